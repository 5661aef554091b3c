"""Carnator Embedded Decode: the embedded model's latent as frames."""

from __future__ import annotations

import comfy.latent_formats
from comfy_api.latest import io

from ..carnator_core.mini import codec
from .host import compat


class CarnatorEmbeddedDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return compat.schema(
            io,
            node_id="CarnatorEmbeddedDecode",
            display_name="Carnator Embedded Decode",
            category="carnator/embedded",
            description="Turns the embedded model's latent into frames, without a VAE: one frame per latent frame, "
            "2 x 2 pixels per latent position.",
            search_aliases=["vae decode", "embedded model"],
            inputs=[
                io.Latent.Input(
                    "samples",
                    tooltip="The latent that a sampler made with the embedded model: 16 channels. "
                    "An empty latent of 128 x 128, length 17, gives a clip of 5 frames of 32 x 32 pixels.",
                )
            ],
            outputs=[io.Image.Output(tooltip="The frames, clip behind clip if the batch holds several.")],
        )

    @classmethod
    def execute(cls, samples: dict) -> io.NodeOutput:
        """Latent (B, 16, T, h, w) in Wan's stored scaling -> frames (B T, 2h, 2w, 3) in [0, 1]."""
        latent = samples["samples"]
        if latent.ndim != 5 or latent.shape[1] != codec.CHANNELS:
            raise ValueError(
                f"Carnator Embedded Decode takes a video latent of {codec.CHANNELS} channels, "
                f"got one of shape {tuple(latent.shape)}. Decode other models' latents with their own VAE."
            )
        # samplers hand latents out in the scaling of Wan's VAE; the codec speaks the model's own
        inner = comfy.latent_formats.Wan21().process_in(latent.float().cpu())
        frames = (codec.decode(inner) + 1) / 2
        return io.NodeOutput(frames.permute(0, 2, 3, 4, 1).flatten(0, 1).contiguous())
