"""Folders that the pack tells ComfyUI about."""

from __future__ import annotations

from pathlib import Path

import folder_paths

from ...carnator_core import mini
from . import banks


def register() -> None:
    """Add the embedded model's folder behind the user's own, so that "Load Diffusion Model" lists it, and the caches'.

    Reads only; nothing is created.
    """
    banks.register()
    folder_paths.add_model_folder_path("diffusion_models", str(Path(mini.__file__).parent / "weights"))
