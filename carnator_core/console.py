"""What all commands share: exit codes, the bank's folder, argument types, progress bars, output for terminals.

Imports the standard library only, so that `doctor` can run where the rest cannot.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

OK, FAILED, BAD_ARGUMENTS = 0, 1, 2
FOLDER_VARIABLE = "CARNATOR_BANK"
PROGRESS_AFTER_SECONDS = 2.0


def bank_folder() -> Path:
    """$CARNATOR_BANK, else `carnator` in the user's cache folder: wherever a person works, the same donors."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    home = Path.home()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "carnator"


def add_bank_option(parser: argparse.ArgumentParser, default: Path | None = None) -> None:
    """`--bank FOLDER`; required where neither $CARNATOR_BANK nor `default` names a folder."""
    found = os.environ.get(FOLDER_VARIABLE) or default
    parser.add_argument(
        "--bank",
        type=Path,
        default=found,
        required=found is None,
        metavar="FOLDER",
        help=f"the bank's folder (default: ${FOLDER_VARIABLE}{f', else {default}' if default else ''})",
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def whole(least: int, most: int) -> Callable[[str], int]:
    """An argument type: whole numbers from `least` to `most`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return value

    return read


def usable_folder(parser_error: Callable[[str], Any], option: str, path: Path) -> None:
    """Report, as a bad argument, a path that is there and is no folder."""
    if path.exists() and not path.is_dir():
        parser_error(f"{option}: {path} is no folder")


def progress(total: int, note: str, unit: str = "step") -> Any:
    """A tqdm bar on stderr that shows itself only to a terminal, and only where the work takes longer than 2 s."""
    from tqdm import tqdm

    hidden = not sys.stderr.isatty()
    return tqdm(total=total, desc=note, unit=unit, delay=PROGRESS_AFTER_SECONDS, disable=hidden, file=sys.stderr)


def say(text: str) -> None:
    """A line for people that is not the command's result."""
    print(text, file=sys.stderr)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=1))


def plain(text: Any, width: int) -> str:
    """Printable text of at most `width` characters: a stored prompt must not steer the terminal."""
    clean = "".join(c if c.isprintable() else " " for c in str(text))
    return clean if len(clean) <= width else clean[: width - 3] + "..."


def size_in_words(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def age_in_words(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
