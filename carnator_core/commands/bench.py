"""`bench`: every room's own benchmark, where it has one."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

MODULES = {  # command -> the module that adds it
    "reuse": "evaluation.bench",
    "quality": "evaluation.quality",
    "speed": "evaluation.speed",
    "context": "evaluation.context",
    "connectivity": "evaluation.connectivity",
    "attention": "attention.bench",
    "bank": "bank.bench",
}


def add_parser(subparsers: Any) -> None:
    """Mounts every benchmark whose module is there; one that cannot be loaded is named in the help, with the reason."""
    root = __package__.rpartition(".")[0]
    text = "measurements, each on this machine"
    parser = subparsers.add_parser("bench", help=text, description=text)
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    missing = []
    for name, place in MODULES.items():
        module = f"{root}.{place}"
        if importlib.util.find_spec(module) is None:
            continue
        try:
            importlib.import_module(module).add_parser(commands)
        except (ImportError, AttributeError) as error:
            missing.append(f"bench {name} is not available here: {error}")
    for one in commands.choices.values():
        one.set_defaults(run=partial(_guarded, one, one.get_default("run")))
    parser.epilog = "; ".join(missing) or None


def _guarded(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], args: argparse.Namespace
) -> int:
    """Benchmarks check some of their arguments only when they run."""
    try:
        return run(args)
    except ValueError as error:
        parser.error(str(error))
