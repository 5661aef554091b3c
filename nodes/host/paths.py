"""Folders that the pack tells ComfyUI about."""

from __future__ import annotations

from pathlib import Path

import folder_paths

from ...carnator_core import mini
from . import banks

WEIGHTS = Path(mini.__file__).parent / "weights"
LORAS = Path(mini.__file__).parent / "loras"  # a folder of its own: ComfyUI lists all files below a folder
LORA = "carnator_mini_fewstep_lora.safetensors"  # named here: the core's own module needs diffusers, ComfyUI does not


def register(loras: Path = LORAS) -> None:
    """Add the embedded model's folders behind the user's own, so that the host's loaders list it, and the caches'.

    That of the few-step LoRA only where it exists. Reads only; nothing is created.
    """
    banks.register()
    folder_paths.add_model_folder_path("diffusion_models", str(WEIGHTS))
    if (loras / LORA).is_file():
        folder_paths.add_model_folder_path("loras", str(loras))
