"""What differs between versions of ComfyUI; no other file asks which version it runs in."""

from __future__ import annotations

import dataclasses
import importlib

OLDEST = "0.3.64"
_NEEDED = (
    ("comfy_api.latest", "ComfyExtension"),
    ("comfy.patcher_extension", "WrappersMP"),
    ("folder_paths", "add_model_folder_path"),
)


def version() -> str:
    """ComfyUI's version, or "unknown" where it does not say."""
    try:
        return importlib.import_module("comfyui_version").__version__
    except (ImportError, AttributeError):
        return "unknown"


def too_old() -> str | None:
    """A sentence for the user if this ComfyUI lacks what the pack stands on, else None."""
    for module, name in _NEEDED:
        try:
            found = hasattr(importlib.import_module(module), name)
        except ImportError:
            found = False
        if not found:
            return (
                f"Carnator needs ComfyUI {OLDEST} or newer and this one ({version()}) lacks {module}.{name}: "
                "please update ComfyUI. No Carnator node was registered."
            )
    return None


def schema(io, **fields):
    """An `io.Schema` of the fields that this version knows; later ones (search_aliases) only help where they exist."""
    known = {field.name for field in dataclasses.fields(io.Schema)}
    return io.Schema(**{name: value for name, value in fields.items() if name in known})
