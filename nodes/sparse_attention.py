"""Carnator Sparse Attention Patch: attention where it looks, and nowhere else."""

from __future__ import annotations

from comfy_api.latest import io

from .host import compat
from .host.setup import SparseChoice, setup_of, with_setup

KERNELS = ("auto", "portable", "off")


class CarnatorSparseAttentionPatch(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return compat.schema(
            io,
            node_id="CarnatorSparseAttentionPatch",
            display_name="Carnator Sparse Attention Patch",
            category="carnator",
            description="Finds in the first steps which parts of a clip look at which, and computes attention only "
            "there. Useful without any cache; pays on long clips, and steps aside where it would not.",
            search_aliases=["block sparse", "faster attention", "radial attention"],
            inputs=[
                io.Model.Input(
                    "model", tooltip="A text-to-video model (Wan, LTX-Video, HunyuanVideo, the embedded model)."
                ),
                io.Float.Input(
                    "kept",
                    default=0.95,
                    min=0.5,
                    max=1.0,
                    step=0.01,
                    tooltip="Share of attention that is kept. 0.95 is a good value; less is faster and less exact.",
                ),
                io.Combo.Input(
                    "kernel",
                    options=list(KERNELS),
                    default="auto",
                    tooltip="auto: sparse only where it measures faster than your own attention. portable: always "
                    "sparse. off: the node does nothing.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model for the sampler.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model, kept: float, kernel: str) -> io.NodeOutput:
        node = cls.hidden.unique_id if cls.hidden else None
        choice = None if kernel == "off" else SparseChoice(kept, kernel)
        return io.NodeOutput(with_setup(model, setup_of(model).changed(node, sparse=choice)))
