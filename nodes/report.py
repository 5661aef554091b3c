"""Carnator Report: what happened in the run that made a latent."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from comfy_api.latest import io

from ..carnator_core.report import RunReport
from .host import compat
from .host.setup import REPORTS, digest_of_latent, setup_of

TINT = torch.tensor([1.0, 0.35, 0.1])  # of the region where donor and target differ


def drawn(image: torch.Tensor, region: torch.Tensor) -> torch.Tensor:
    """Frames (N, H, W, 3) in [0, 1] with a region (t, h, w) of the token grid tinted; frames share its time evenly."""
    places = (torch.arange(len(image)) * len(region) // len(image)).clamp(max=len(region) - 1)
    mask = F.interpolate(region[places][:, None].float(), size=image.shape[1:3], mode="nearest")[:, 0, :, :, None]
    return image * (1 - 0.35 * mask) + TINT.to(image) * 0.35 * mask


class CarnatorReport(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return compat.schema(
            io,
            node_id="CarnatorReport",
            display_name="Carnator Report",
            category="carnator",
            description="Tells what Carnator did in the run that made this latent: decision, risk, steps, time. The "
            "latent passes through unchanged.",
            search_aliases=["hit", "miss", "statistics"],
            inputs=[
                io.Model.Input("model", tooltip="The model that the sampler used (from Carnator)."),
                io.Latent.Input("samples", tooltip="The sampler's latent."),
                io.Image.Input(
                    "images", optional=True, tooltip="The decoded frames, to draw the region that was different."
                ),
            ],
            outputs=[
                io.Latent.Output(display_name="samples", tooltip="The same latent."),
                io.String.Output(display_name="summary", tooltip="One line for people, then the whole report as JSON."),
                io.Image.Output(display_name="images", tooltip="The frames with the different region tinted."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model, samples: dict, images: torch.Tensor | None = None) -> io.NodeOutput:
        """LATENT -> LATENT, STRING, IMAGE; the report also goes to the ui output, and so into /history."""
        found = REPORTS.get(digest_of_latent(samples["samples"]))
        report = found.report if found else RunReport(decision="off", reason=_unknown(model))
        evidence = found.evidence if found else None
        if images is None:
            images = torch.zeros(1, 8, 8, 3)
        elif evidence is not None:
            images = drawn(images, evidence.region)
        summary, whole = report.summary(), report.to_json()
        ui = {"carnator": [{"report": report.to_dict(), "summary": summary}]}
        return io.NodeOutput(samples, f"{summary}\n{whole}", images, ui=ui)


def _unknown(model) -> str:
    """Why there is no report for this latent."""
    missing = setup_of(model).missing
    return f"nothing was reused: {missing}" if missing else "this latent is not from a recent run with this model"
