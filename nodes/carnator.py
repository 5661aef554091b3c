"""Carnator: the one node that most people need."""

from __future__ import annotations

from comfy_api.latest import io

from ..carnator_core.gate.policy import DEFAULT, POLICIES
from .host import compat
from .host.setup import CacheChoice, setup_of, with_setup
from .types import Cache

POLICY_TOOLTIP = (
    "How much an earlier clip may lend. safe: only where both clips nearly agree, few steps are skipped. balanced: the "
    "good value. fast: more is accepted and more steps are skipped; the clip may differ a little more from a full run."
)


class Carnator(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return compat.schema(
            io,
            node_id="Carnator",
            display_name="Carnator",
            category="carnator",
            description="Put it between the model and the sampler. The next clip with nearly the same prompt and the "
            "same seed borrows from the last one and is sampled faster. The report says what was reused.",
            search_aliases=["reuse", "cache", "speed up", "faster video", "teacache"],
            inputs=[
                io.Model.Input(
                    "model", tooltip="A text-to-video model (Wan, LTX-Video, HunyuanVideo, the embedded model)."
                ),
                io.Combo.Input("policy", options=list(POLICIES), default=DEFAULT, tooltip=POLICY_TOOLTIP),
                Cache.Input(
                    "cache",
                    optional=True,
                    tooltip="From Carnator Reuse Cache, to choose another cache or budget. Without it: models/carnator/"
                    "default, at most 20 GB.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model for the sampler, and for Carnator Report.")],
            hidden=[io.Hidden.unique_id],
            not_idempotent=True,  # the id is part of the result: with another's, events would go to that node
        )

    @classmethod
    def execute(cls, model, policy: str, cache: CacheChoice | None = None) -> io.NodeOutput:
        """MODEL -> MODEL; the given model is not changed."""
        node = cls.hidden.unique_id if cls.hidden else None
        setup = setup_of(model).changed(node, cache=cache or CacheChoice(), policy=policy, gated=True)
        return io.NodeOutput(with_setup(model, setup))
