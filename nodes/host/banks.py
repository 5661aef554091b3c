"""Banks in ComfyUI's models directory: one object a folder and process, opened when first used."""

from __future__ import annotations

import threading
from pathlib import Path

import folder_paths

from ...carnator_core.bank import Bank
from .setup import CacheChoice

FOLDER = "carnator"  # below models/, and the name in extra_model_paths.yaml
_OPEN: dict[tuple[Path, int, str], Bank] = {}
_LOCK = threading.Lock()


def register() -> None:
    """Make models/carnator a model folder; it is created when something is first written."""
    folder_paths.add_model_folder_path(FOLDER, str(Path(folder_paths.models_dir) / FOLDER))


def folder_of(name: str) -> Path:
    """The folder of a named bank: the first configured place. ValueError for a name that is no plain folder name."""
    if not name or name != Path(name).name or name.startswith("."):
        raise ValueError(f"the cache name {name!r} must be a plain folder name, such as default")
    return Path(folder_paths.get_folder_paths(FOLDER)[0]) / name


def bank_of(choice: CacheChoice) -> Bank:
    """The bank of a choice; no file is touched before it is used."""
    key = (folder_of(choice.name), max(1, int(choice.budget_gb * 1e9)), choice.mode)
    with _LOCK:
        if key not in _OPEN:
            _OPEN[key] = Bank(*key)
        return _OPEN[key]
