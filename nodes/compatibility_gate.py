"""Carnator Compatibility Gate: which donors are accepted."""

from __future__ import annotations

from comfy_api.latest import io

from ..carnator_core.gate.policy import DEFAULT, POLICIES
from ..carnator_core.reuse.seeds import OWN, SEED_POLICIES
from .carnator import POLICY_TOOLTIP
from .host import compat
from .host.setup import setup_of, with_setup


class CarnatorCompatibilityGate(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return compat.schema(
            io,
            node_id="CarnatorCompatibilityGate",
            display_name="Carnator Compatibility Gate",
            category="carnator/single steps",
            description="Decides whether an earlier clip may lend to this one. Needs Carnator Early Probe on the same "
            "model.",
            search_aliases=["risk", "threshold"],
            inputs=[
                io.Model.Input("model", tooltip="A text-to-video model."),
                io.Combo.Input("policy", options=list(POLICIES), default=DEFAULT, tooltip=POLICY_TOOLTIP),
                io.String.Input(
                    "donor",
                    default="",
                    tooltip="Leave it empty. The id of a donor from a report makes this run borrow from that clip "
                    "only, which reproduces a reused clip bit for bit.",
                ),
                io.Combo.Input(
                    "seed_policy",
                    options=list(SEED_POLICIES),
                    default=OWN,
                    optional=True,
                    tooltip="Whose seed a clip starts from. own: yours; a clip of another seed lends nothing. donor: "
                    "the nearest earlier clip's, so that it can lend although your seed changes from run to run.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="For the sampler, or for Carnator Early Probe.")],
            hidden=[io.Hidden.unique_id],
            not_idempotent=True,  # the id is part of the result: with another's, events would go to that node
        )

    @classmethod
    def execute(cls, model, policy: str, donor: str, seed_policy: str = OWN) -> io.NodeOutput:
        node = cls.hidden.unique_id if cls.hidden else None
        changes = {"policy": policy, "donor": donor.strip() or None, "gated": True, "seeds": seed_policy}
        return io.NodeOutput(with_setup(model, setup_of(model).changed(node, **changes)))
