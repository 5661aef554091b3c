"""Folders that the pack tells ComfyUI about."""

from __future__ import annotations

from pathlib import Path

import folder_paths

from ...carnator_core import mini
from . import banks

WEIGHTS = Path(mini.__file__).parent / "weights"
LORA = "carnator_mini_fewstep_lora.safetensors"  # named here: the core's own module needs diffusers, ComfyUI does not


def register(weights: Path = WEIGHTS) -> None:
    """Add the embedded model's folder behind the user's own, so that "Load Diffusion Model" lists it, and the caches'.

    With the few-step LoRA in it, "Load LoRA" lists it too. Reads only; nothing is created.
    """
    banks.register()
    folder_paths.add_model_folder_path("diffusion_models", str(weights))
    if (weights / LORA).is_file():
        folder_paths.add_model_folder_path("loras", str(weights))
