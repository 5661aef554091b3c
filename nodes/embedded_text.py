"""Carnator Embedded Text: a prompt for the embedded model."""

from __future__ import annotations

from comfy_api.latest import io

from ..carnator_core.mini import text as encoder
from .host import compat


class CarnatorEmbeddedText(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return compat.schema(
            io,
            node_id="CarnatorEmbeddedText",
            display_name="Carnator Embedded Text",
            category="carnator/embedded",
            description="Encodes a prompt for the embedded model. Needs no text encoder and no download.",
            search_aliases=["prompt", "text encode", "embedded model"],
            inputs=[
                io.String.Input(
                    "text",
                    multiline=True,
                    dynamic_prompts=True,
                    default="one large red ball moving left over the sea, steady camera",
                    tooltip="What the clip shows, in the words of the embedded world (the help page lists them). "
                    "Change one word and run again. Leave it empty for the negative prompt.",
                )
            ],
            outputs=[io.Conditioning.Output(tooltip="For the positive or negative input of a sampler.")],
        )

    @classmethod
    def execute(cls, text: str) -> io.NodeOutput:
        """One embedding (1, 32, 4096), rows behind the prompt's end zero."""
        return io.NodeOutput([[encoder.encode([text]), {}]])
