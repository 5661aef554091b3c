"""`bank ls|show|rm|verify|gc|rebuild`: the bank from the command line.

Exit codes: 0 done, 1 something failed or was not found, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from .store import BUDGET_BYTES, Bank

OK, FAILED, BAD_ARGUMENTS = 0, 1, 2
FOLDER_VARIABLE = "CARNATOR_BANK"
PREFIX = re.compile(r"[0-9a-f]{4,32}\Z")
PROGRESS_AFTER_SECONDS = 2.0


def add_parser(subparsers: Any) -> None:
    """Add `bank` and its commands; each leaves in `args.run` a function of args that returns the exit code."""
    bank = subparsers.add_parser("bank", help="list, inspect, verify and clean the donors on disk")
    commands = bank.add_subparsers(dest="bank_command", required=True, metavar="COMMAND")
    for name, run, text in (
        ("ls", ls, "list all entries, the latest used first"),
        ("show", show, "all that is known of one entry"),
        ("rm", rm, "delete entries"),
        ("verify", verify, "read and check every file; unreadable entries go to quarantine"),
        ("gc", gc, "sweep leftovers and evict down to the budget"),
        ("rebuild", rebuild, "make the index anew from the entries"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        _add_common(command)
        if name in ("show", "rm"):
            command.add_argument("ids", metavar="ID", type=_prefix, nargs=1 if name == "show" else "+", help=ID_HELP)
        command.set_defaults(run=partial(_guarded, run))


ID_HELP = "an entry's id, or its first digits (at least 4)"


def _add_common(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get(FOLDER_VARIABLE)
    parser.add_argument(
        "--bank",
        type=Path,
        default=default,
        required=default is None,
        metavar="FOLDER",
        help=f"the bank's folder (default: ${FOLDER_VARIABLE})",
    )
    parser.add_argument(
        "--budget-gib",
        type=_positive,
        default=BUDGET_BYTES / 2**30,
        help="budget on disk in GiB (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _prefix(text: str) -> str:
    if not PREFIX.match(text.lower()):
        raise argparse.ArgumentTypeError(f"{text!r} is no id; an id is 32 hexadecimal digits, its first 4 suffice")
    return text.lower()


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of GiB")
    return value


def _guarded(run: Callable[[argparse.Namespace, Bank], int], args: argparse.Namespace) -> int:
    """Open the bank for one command; a folder that is none is a bad argument."""
    if not args.bank.is_dir():
        print(f"there is no folder {args.bank}; name the bank's folder with --bank", file=sys.stderr)
        return BAD_ARGUMENTS
    with Bank(args.bank, budget_bytes=max(1, int(args.budget_gib * 2**30))) as bank:
        return run(args, bank)


def _resolve(bank: Bank, prefixes: Iterable[str]) -> tuple[list[str], int]:
    """Ids for prefixes and an exit code: 1 when one names nothing, 2 when one names several entries."""
    known, found = [info.id for info in bank.ls()], []
    for prefix in prefixes:
        matches = [one for one in known if one.startswith(prefix)]
        if not matches:
            print(f"no entry {prefix} in {bank.root}", file=sys.stderr)
            return [], FAILED
        if len(matches) > 1:
            print(f"{prefix} names {len(matches)} entries; give more digits", file=sys.stderr)
            return [], BAD_ARGUMENTS
        found += matches
    return list(dict.fromkeys(found)), OK


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1))


def _plain(text: Any, width: int) -> str:
    """Printable text of at most `width` characters: a stored prompt must not steer the terminal."""
    clean = "".join(c if c.isprintable() else " " for c in str(text))
    return clean if len(clean) <= width else clean[: width - 3] + "..."


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def ls(args: argparse.Namespace, bank: Bank) -> int:
    """All entries and the totals."""
    infos, stats = bank.ls(), bank.stats()
    if args.json:
        _print_json({"entries": [info.to_dict() for info in infos], "stats": asdict(stats)})
        return OK
    now = time.time()
    rows = [
        (
            info.id[:12],
            _plain(info.prompt, 48),
            "x".join(map(str, info.identity.latent_shape)),
            _size(info.bytes),
            str(info.uses),
            f"{info.saved_seconds:.0f} s",
            _age(now - info.last_used),
        )
        for info in infos
    ]
    _table(("id", "prompt", "latent", "size", "uses", "saved", "unused for"), rows)
    total = stats.entry_bytes + stats.other_bytes
    print(
        f"{stats.entries} entries of {stats.identities} identities, {_size(total)} of {_size(stats.budget_bytes)},"
        f" {stats.quarantined} in quarantine, {stats.saved_seconds:.0f} s saved"
    )
    return OK


def show(args: argparse.Namespace, bank: Bank) -> int:
    """One entry in full."""
    ids, code = _resolve(bank, args.ids)
    if code:
        return code
    data = bank.show(ids[0])
    if data is None:
        print(f"entry {ids[0]} cannot be read: {' '.join(bank.warnings[-1:])}", file=sys.stderr)
        return FAILED
    if args.json:
        _print_json(data)
        return OK
    for key, value in data.items():
        if isinstance(value, dict):
            for name, inner in value.items():
                print(f"{key}.{name}: {_plain(inner, 100)}")
        else:
            print(f"{key}: {_plain(value, 100)}")
    return OK


def rm(args: argparse.Namespace, bank: Bank) -> int:
    """Delete entries; 1 when one could not be deleted."""
    ids, code = _resolve(bank, args.ids)
    if code:
        return code
    removed = [one for one in ids if bank.remove(one)]
    if args.json:
        _print_json({"removed": removed, "failed": sorted(set(ids) - set(removed))})
    else:
        print(f"{len(removed)} of {len(ids)} entries deleted")
    return OK if len(removed) == len(ids) else FAILED


def _progress(ids: list[str]) -> Iterable[str]:
    from tqdm import tqdm  # only here: the bank itself needs no progress bar

    return tqdm(ids, desc="verify", unit="entry", delay=PROGRESS_AFTER_SECONDS, file=sys.stderr)


def verify(args: argparse.Namespace, bank: Bank) -> int:
    """Check everything; 1 when an entry is bad."""
    found = bank.verify(iter if args.json else _progress)
    bad = {one: reason for one, reason in found.items() if reason}
    if args.json:
        _print_json({"checked": len(found), "bad": bad})
    else:
        for one, reason in bad.items():
            print(f"{one}: {_plain(reason, 200)}")
        print(f"{len(found) - len(bad)} of {len(found)} entries are sound")
    return FAILED if bad else OK


def gc(args: argparse.Namespace, bank: Bank) -> int:
    """Clean up; prints what was done."""
    return _counts(args, bank, bank.gc(), "{swept} leftovers swept, {evicted} entries evicted, {entries} remain")


def rebuild(args: argparse.Namespace, bank: Bank) -> int:
    """A new index."""
    return _counts(args, bank, {"entries": bank.rebuild()}, "the index holds {entries} entries")


def _counts(args: argparse.Namespace, bank: Bank, counts: dict[str, int], sentence: str) -> int:
    """Print counts, and what went wrong on the way; no counts mean failure."""
    if args.json:
        _print_json({**counts, "warnings": bank.warnings})
    elif counts:
        print(sentence.format(**counts))
    return OK if counts and not bank.warnings else FAILED
