"""`generate PROMPT`: one clip from the embedded model, with what the bank can lend it."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from .. import media
from ..bank import Bank
from ..console import (
    OK,
    add_bank_option,
    add_json_option,
    bank_folder,
    plain,
    print_json,
    progress,
    say,
    usable_folder,
    whole,
)
from ..gate.policy import DEFAULT, POLICIES
from ..mini import world
from ..reuse.seeds import OWN, SEED_POLICIES
from .embedded import add_options, generator
from .explain import explain, print_explanation

EXAMPLE = "one large red ball moving left over the forest, steady camera"
UNKNOWN_WORDS = (
    "warning: the embedded model knows only the words of its own world, and this prompt does not name exactly one "
    f"{', one '.join(world.ATTRIBUTES)} of it; the clip may show anything"
)
NAME_LENGTH = 48


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        description="Generate one clip with the embedded model: a GIF, a PNG strip of its frames, and the run report."
        " A clip that was computed in full stays in the bank and may lend to later ones.",
    )
    parser.add_argument("prompt", type=_prompt, metavar="PROMPT", help=f'for example "{EXAMPLE}"')
    add_bank_option(parser, bank_folder())
    text = "which noise to start from; predictions are lent between equal seeds only (default: %(default)d)"
    parser.add_argument("--seed", type=whole(0, 2**63 - 1), default=0, help=text)
    add_options(parser)
    text = "how much risk to take (default: %(default)s)"
    parser.add_argument("--policy", choices=POLICIES, default=DEFAULT, help=text)
    text = "whose seed to start from: your own, or the nearest donor's, so that it can lend (default: %(default)s)"
    parser.add_argument("--seed-policy", choices=SEED_POLICIES, default=OWN, help=text)
    text = "where the files go (default: ./%(default)s)"
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="FOLDER", help=text)
    text = "print what is known before the run, and do not run; nothing is written anywhere"
    parser.add_argument("--explain", action="store_true", help=text)
    add_json_option(parser)
    parser.set_defaults(run=partial(run, parser))


def _prompt(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("the prompt is not valid text") from None
    if not text.strip():
        raise argparse.ArgumentTypeError("the prompt is empty")
    return text


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    usable_folder(parser.error, "--bank", args.bank)
    usable_folder(parser.error, "--out", args.out)
    known = world.parse(args.prompt) is not None
    if not known:
        say(UNKNOWN_WORDS)
    with Bank(args.bank, mode="read-only" if args.explain else "on") as bank:
        return _explain(args, bank, known) if args.explain else _generate(args, bank, known)


def _explain(args: argparse.Namespace, bank: Bank, known: bool) -> int:
    found = explain(generator(bank, args.policy), args.prompt, args.seed, args.size, args.steps)
    if args.json:
        print_json({**found, "known_words": known})
    else:
        print_explanation(found)
    return OK


def _generate(args: argparse.Namespace, bank: Bank, known: bool) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    make = generator(bank, args.policy)
    with progress(args.steps, "denoise") as bar:
        clip = make(
            args.prompt,
            args.seed,
            args.size,
            args.steps,
            on_step=lambda done, steps: bar.update(),
            seeds=args.seed_policy,
        )
    name = file_name(args.prompt, args.seed, args.size, args.steps)
    files = media.write_all(args.out, name, clip.frames)
    files["report"] = f"{name}.json"
    asked = {"prompt": args.prompt, "seed": args.seed, "size": args.size, "steps": args.steps, "known_words": known}
    result = {**asked, "bank": str(args.bank), "report": clip.report.to_dict()}
    (args.out / files["report"]).write_text(json.dumps(result, indent=1), encoding="utf-8")
    paths = {kind: str(args.out / file) for kind, file in files.items()}
    if args.json:
        print_json({**result, "files": paths})
        return OK
    print(clip.report.summary())
    for warning in clip.report.warnings:
        say(f"warning: {plain(warning, 300)}")
    print("\n".join(paths.values()))
    return OK


def file_name(prompt: str, seed: int, size: int, steps: int) -> str:
    """A name that any file system takes; the same request gets the same one."""
    words = "".join(c if c.isalnum() else " " for c in prompt.lower()).split()
    return f"{'-'.join(words)[:NAME_LENGTH].strip('-') or 'clip'}-seed{seed}-{size}px-{steps}"
