"""`bank ls|show|rm|verify|gc|rebuild`: the bank from the command line.

Exit codes: 0 done, 1 something failed or was not found, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ..console import (
    BAD_ARGUMENTS,
    FAILED,
    OK,
    PROGRESS_AFTER_SECONDS,
    add_bank_option,
    add_json_option,
    age_in_words,
    plain,
    print_json,
    print_table,
    size_in_words,
)
from .store import BUDGET_BYTES, Bank

PREFIX = re.compile(r"[0-9a-f]{4,32}\Z")


def add_parser(subparsers: Any, folder: Path | None = None) -> None:
    """Add `bank` and its commands; each leaves in `args.run` a function of args that returns the exit code.

    `folder`: the bank's where neither an argument nor the environment names one; without it they must.
    """
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
        _add_common(command, folder)
        if name in ("show", "rm"):
            command.add_argument("ids", metavar="ID", type=_prefix, nargs=1 if name == "show" else "+", help=ID_HELP)
        command.set_defaults(run=partial(_guarded, run))


ID_HELP = "an entry's id, or its first digits (at least 4)"


def _add_common(parser: argparse.ArgumentParser, folder: Path | None) -> None:
    add_bank_option(parser, folder)
    parser.add_argument(
        "--budget-gib",
        type=_positive,
        default=BUDGET_BYTES / 2**30,
        help="budget on disk in GiB (default: %(default)g)",
    )
    add_json_option(parser)


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


def ls(args: argparse.Namespace, bank: Bank) -> int:
    """All entries and the totals."""
    infos, stats = bank.ls(), bank.stats()
    if args.json:
        print_json({"entries": [info.to_dict() for info in infos], "stats": asdict(stats)})
        return OK
    now = time.time()
    rows = [
        (
            info.id[:12],
            plain(info.prompt, 48),
            "x".join(map(str, info.identity.latent_shape)),
            size_in_words(info.bytes),
            str(info.uses),
            f"{info.saved_seconds:.0f} s",
            age_in_words(now - info.last_used),
        )
        for info in infos
    ]
    print_table(("id", "prompt", "latent", "size", "uses", "saved", "unused for"), rows)
    used, budget = (size_in_words(size) for size in (stats.entry_bytes + stats.other_bytes, stats.budget_bytes))
    print(
        f"{stats.entries} entries of {stats.identities} identities, {used} of {budget},"
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
        print_json(data)
        return OK
    for key, value in data.items():
        if isinstance(value, dict):
            for name, inner in value.items():
                print(f"{key}.{name}: {plain(inner, 100)}")
        else:
            print(f"{key}: {plain(value, 100)}")
    return OK


def rm(args: argparse.Namespace, bank: Bank) -> int:
    """Delete entries; 1 when one could not be deleted."""
    ids, code = _resolve(bank, args.ids)
    if code:
        return code
    removed = [one for one in ids if bank.remove(one)]
    if args.json:
        print_json({"removed": removed, "failed": sorted(set(ids) - set(removed))})
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
        print_json({"checked": len(found), "bad": bad})
    else:
        for one, reason in bad.items():
            print(f"{one}: {plain(reason, 200)}")
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
        print_json({**counts, "warnings": bank.warnings})
    elif counts:
        print(sentence.format(**counts))
    return OK if counts and not bank.warnings else FAILED
