"""Carnator Early Probe: how many first steps are computed before anything may be reused."""

from __future__ import annotations

from comfy_api.latest import io

from ..carnator_core.schedule import PROBE_SHARE
from .host import compat
from .host.setup import CacheChoice, setup_of, with_setup
from .types import Cache


class CarnatorEarlyProbe(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return compat.schema(
            io,
            node_id="CarnatorEarlyProbe",
            display_name="Carnator Early Probe",
            category="carnator/single steps",
            description="Computes the first steps in full and reads from the model what the prompt is about to become. "
            "Needs Carnator Compatibility Gate on the same model.",
            search_aliases=["signature"],
            inputs=[
                io.Model.Input("model", tooltip="A text-to-video model."),
                Cache.Input("cache", tooltip="From Carnator Reuse Cache."),
                io.Float.Input(
                    "share",
                    default=PROBE_SHARE,
                    min=0.02,
                    max=0.5,
                    step=0.01,
                    tooltip="Share of the schedule, at least one step. 0.08 (4 of 50) is a good value; more is safer "
                    "and slower.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="For the sampler, or for Carnator Compatibility Gate.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model, cache: CacheChoice, share: float) -> io.NodeOutput:
        node = cls.hidden.unique_id if cls.hidden else None
        return io.NodeOutput(with_setup(model, setup_of(model).changed(node, cache=cache, probe=share)))
