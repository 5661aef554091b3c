"""`doctor`: what Carnator finds on this machine, and what keeps it from working.

Nothing but the standard library is imported before it is known to be there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .. import __version__
from ..console import FAILED, OK, add_bank_option, add_json_option, bank_folder, plain, print_json, size_in_words

NEEDED = ("torch", "diffusers", "numpy", "safetensors", "einops", "pillow", "tqdm")
OPTIONAL = {
    "transformers": "diffusers' pipelines need it; the embedded model does not",
    "av": "clips as MP4",
    "triton": "compiled sparse attention on GPUs",
}
OLDEST_PYTHON = (3, 10)
PIPELINES = (  # class of pipeline, what else `attach` looks at, a note
    ("WanPipeline", {}, "Wan 2.1 text-to-video"),
    ("WanPipeline", {"transformer_2": object()}, "Wan 2.2 14B"),
    ("WanImageToVideoPipeline", {}, ""),
    ("LTXPipeline", {}, ""),
    ("HunyuanVideoPipeline", {}, ""),
    ("CogVideoXPipeline", {}, ""),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        description="Versions, devices, the bank's health, which pipelines are supported and why others are not."
        " Exit code 1 when something keeps Carnator from working.",
    )
    add_bank_option(parser, bank_folder())
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = examine(args.bank)
    if args.json:
        print_json(found)
    else:
        _print(found)
    return FAILED if found["problems"] else OK


def examine(bank: Path) -> dict[str, Any]:
    """Everything, as plain data; `problems` holds a sentence for each thing that must be mended."""
    versions, problems = _versions()
    found: dict[str, Any] = {"versions": versions, "optional": _optional(), "system": _system()}
    if problems:
        return {**found, "problems": problems}
    parts = {
        "devices": _devices,
        "model": _model,
        "bank": partial(_bank, bank),
        "pipelines": _pipelines,
    }
    for name, look in parts.items():
        try:
            found[name], more = look()
        except Exception as error:  # whatever is broken here is the finding
            found[name], more = None, [f"{name} cannot be examined: {type(error).__name__}: {error}"]
        problems += more
    return {**found, "problems": problems}


# --- versions ---


def _versions() -> tuple[dict[str, str | None], list[str]]:
    versions: dict[str, str | None] = {"carnator": __version__, "python": platform.python_version()}
    problems = []
    if sys.version_info < OLDEST_PYTHON:
        problems.append(f"Python {platform.python_version()} is too old; {'.'.join(map(str, OLDEST_PYTHON))} is needed")
    least = dict(_lower_bounds())
    for name in NEEDED:
        versions[name] = _version(name)
        if versions[name] is None:
            problems.append(f"{name} is not installed; pip install -r requirements.txt")
        elif _numbers(versions[name]) < _numbers(least.get(name, "0")):
            problems.append(f"{name} {versions[name]} is too old; at least {least[name]} is needed")
    return versions, problems


def _optional() -> dict[str, dict[str, str | None]]:
    return {name: {"version": _version(name), "for": use} for name, use in OPTIONAL.items()}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lower_bounds() -> Iterator[tuple[str, str]]:
    """Names and oldest versions: from requirements.txt beside the package, or from the installed package."""
    beside = Path(__file__).parents[2] / "requirements.txt"
    try:
        lines = beside.read_text().splitlines() if beside.is_file() else importlib.metadata.requires("carnator") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    for line in lines:
        if match := re.match(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)", line):
            yield match[1].lower(), match[2]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[0-9.]*", version)[0].split(".") if part)


def _system() -> dict[str, Any]:
    return {"platform": platform.platform(), "machine": platform.machine(), "cores": os.cpu_count()}


# --- devices ---


def _devices() -> tuple[list[dict[str, Any]], list[str]]:
    """Devices, and the dtypes that each multiplies in hardware, the fastest first."""
    import torch

    instructions = _cpu_instructions()
    short = "bfloat16" if {"amx_bf16", "avx512_bf16"} & set(instructions) else None
    found: list[dict[str, Any]] = [
        {
            "device": "cpu",
            "name": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "instructions": instructions,
            "fast": [short, "float32"] if short else ["float32"],
        }
    ]
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        dtypes = ["float16", "float32"] if card.major < 8 else ["bfloat16", "float16", "float32"]
        found.append({"device": f"cuda:{index}", "name": card.name, "memory": card.total_memory, "fast": dtypes})
    if torch.backends.mps.is_available():
        found.append({"device": "mps", "name": "Apple GPU", "fast": ["float16", "float32"]})
    return found, []


def _cpu_instructions() -> list[str]:
    """Matrix instructions that the processor has and that matter here."""
    import torch

    asks = {
        "amx_bf16": "_is_amx_tile_supported",
        "avx512_bf16": "_is_avx512_bf16_supported",
        "avx512": "_is_avx512_supported",
        "avx2": "_is_avx2_supported",
    }
    return [name for name, ask in asks.items() if getattr(torch.cpu, ask, lambda: False)()]


# --- model, bank, pipelines ---


def _model() -> tuple[dict[str, Any], list[str]]:
    from diffusers.utils import logging

    from ..mini import model
    from ..request import digest_of_weights

    logging.set_verbosity_error()
    try:
        loaded = model.load()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        return {"file": str(model.WEIGHTS)}, [f"the embedded model cannot be loaded: {error}"]
    parameters = sum(p.numel() for p in loaded.parameters())
    digest = digest_of_weights(loaded.named_parameters())
    return {"file": str(model.WEIGHTS), "parameters": parameters, "weights": digest}, []


def _bank(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Reads the bank and changes nothing."""
    from ..bank import Bank

    found: dict[str, Any] = {"folder": str(folder), "exists": folder.is_dir()}
    if folder.exists() and not folder.is_dir():
        return found, [f"the bank's folder {folder} is no folder; choose another with --bank"]
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    found |= {"writable": os.access(place, os.W_OK), "free": shutil.disk_usage(place).free}
    problems = [] if found["writable"] else [f"{place} cannot be written to; choose another folder with --bank"]
    if folder.is_dir():
        with Bank(folder, mode="read-only") as bank:
            found |= asdict(bank.stats()) | {"warnings": list(bank.warnings)}
        problems += [f"bank: {warning}" for warning in found["warnings"]]
    return found, problems


def _pipelines() -> tuple[list[dict[str, Any]], list[str]]:
    """What `attach` says of each pipeline; asked of objects with a pipeline's outside only."""
    from .. import backbones
    from ..pipelines import Attached

    found = [{"pipeline": "Generator", "note": "the embedded model", "supported": True, "why_not": None}]
    for name, more, note in PIPELINES:
        reason = Attached(_outside(name, **more), None).unsupported()
        found.append({"pipeline": name, "note": note, "supported": reason is None, "why_not": reason})
    names = ", ".join(backbone.NAME for backbone in backbones.ALL if backbone.PIPELINES)
    return [{**row, "backbones": names} if row["supported"] else row for row in found], []


def _outside(name: str, **more: Any) -> Any:
    """An object that looks to `attach` like a pipeline of this class."""
    transformer = type("WanTransformer3DModel", (), {"config": SimpleNamespace(image_dim=None)})()
    scheduler = SimpleNamespace(config=SimpleNamespace(prediction_type="flow_prediction"))
    return type(name, (), {"transformer": transformer, "scheduler": scheduler, **more})()


# --- for people ---


def _print(found: dict[str, Any]) -> None:
    print("versions")
    for name, version in found["versions"].items():
        print(f"  {name:14} {version or 'missing'}")
    for name, row in found["optional"].items():
        print(f"  {name:14} {row['version'] or 'not installed'} (optional: {row['for']})")
    print(f"machine\n  {found['system']['platform']}, {found['system']['cores']} cores")
    for row in found.get("devices") or []:
        print(f"  {row['device']:14} {_device_in_words(row)}")
    if model := found.get("model"):
        size = f"{model['parameters'] / 1e6:.1f} M parameters, digest {model['weights'][:8]}"
        print(f"embedded model\n  {size if 'parameters' in model else 'cannot be loaded'}")
    if bank := found.get("bank"):
        print("\n  ".join(("bank", bank["folder"], *_bank_in_words(bank))))
    if rows := found.get("pipelines"):
        print("pipelines")
        for row in rows:
            name = f"{row['pipeline']} ({row['note']})" if row["note"] else row["pipeline"]
            print(f"  {name:36} {'supported' if row['supported'] else 'passed through: ' + row['why_not']}")
    print("problems" if found["problems"] else "no problems found")
    for problem in found["problems"]:
        print(f"  {plain(problem, 300)}")


def _device_in_words(row: dict[str, Any]) -> str:
    parts = [plain(row["name"], 60)]
    if "threads" in row:
        parts += [f"{row['threads']} threads", " ".join(row["instructions"]) or "no wide vectors known"]
    if "memory" in row:
        parts.append(size_in_words(row["memory"]))
    return f"{', '.join(parts)}; fast: {', '.join(row['fast'])}"


def _bank_in_words(bank: dict[str, Any]) -> list[str]:
    if not bank["exists"]:
        return ["not there yet; the first run makes it"]
    if "entries" not in bank:
        return []
    used = bank["entry_bytes"] + bank["other_bytes"]
    return [
        f"{bank['entries']} entries, {size_in_words(used)} of {size_in_words(bank['budget_bytes'])},"
        f" {size_in_words(bank['free'])} free on the disk",
        f"{bank['quarantined']} in quarantine, {bank['uses']} uses, {bank['saved_seconds']:.0f} s saved",
    ]
