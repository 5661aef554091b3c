"""`python -m carnator_core COMMAND`. Exit codes: 0 done, 1 failed, 2 bad arguments."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from .console import FAILED, say

COMMANDS = {
    "demo": "seven requests from an empty bank, and a page that shows what was reused",
    "generate": "one clip from the embedded model, with what the bank can lend it",
    "bench": "measurements",
    "bank": "list, inspect, verify and clean the donors on disk",
    "doctor": "versions, devices, the bank's health, what is supported and why not",
}


def parser_for(command: str | None) -> argparse.ArgumentParser:
    """All commands by name; only the one that was asked for is loaded, so that help is quick and `doctor` can help."""
    parser = argparse.ArgumentParser(prog="python -m carnator_core", description="Carnator: reuse for text-to-video.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        if name == command:
            importlib.import_module(f".commands.{name}", __package__).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = parser_for(argv[0] if argv else None).parse_args(argv)
        return args.run(args)
    except KeyboardInterrupt:
        say("interrupted")
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("carnator_core"):
            raise
        say(f"{error}; `python -m carnator_core doctor` tells what is missing")
    except OSError as error:
        say(f"failed: {error}")
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
