"""`demo --out DIR`: seven requests from an empty bank, each beside its own dense run, as files and as a page."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import media
from ..bank import Bank
from ..console import FAILED, OK, add_json_option, print_json, progress, say, usable_folder
from ..mini import codec, sample, world
from ..mini.evaluate import psnr
from ..mini.judge import Verdict, faithfulness, judge
from ..pipelines import Clip, Generator
from .embedded import add_options, generator
from .page import page

SCENE = world.Scene("ball", "red", "forest", "left", "large", "steady", "one")
FAR = world.Scene("cross", "white", "sea", "up", "small", "panning", "two")  # nothing in common with SCENE
SEED, OTHER_SEED = 7, 8
BANK = "demo-bank"  # below --out; the demo's own, so it may empty it


@dataclass(frozen=True)
class Asked:
    """A request, and the decision it is there to show; None where the gate may answer as it finds."""

    name: str
    scene: world.Scene
    seed: int
    expected: str | None

    @property
    def prompt(self) -> str:
        return world.caption(self.scene)


SCRIPT = (
    Asked("cold", SCENE, SEED, "miss"),
    Asked("same again", SCENE, SEED, "exact"),
    Asked("other object", SCENE.changed(object="ring"), SEED, "joint"),
    Asked("other size", SCENE.changed(size="small"), SEED, "joint"),
    Asked("other colour", SCENE.changed(colour="yellow"), SEED, "joint"),
    Asked("new scene", FAR, SEED, "miss"),
    Asked("other seed", SCENE, OTHER_SEED, None),
)


@dataclass(frozen=True)
class Shown:
    """A request with its clip, its own dense run, and what the judge reads in both."""

    asked: Asked
    clip: Clip
    dense: torch.Tensor  # latent, as `Clip.latent`
    read: Verdict
    read_dense: Verdict
    seconds: float  # of the whole request, decoding included

    @property
    def as_expected(self) -> bool:
        return self.asked.expected in (None, self.clip.report.decision)

    @property
    def bit_equal(self) -> bool:
        return torch.equal(self.clip.latent, self.dense)

    @property
    def dense_frames(self) -> torch.Tensor:
        return codec.decode(self.dense)[0]

    @property
    def psnr(self) -> float:
        """Of the pixels to the own dense clip, in dB; 126 where nothing differs."""
        return psnr(self.clip.frames - self.dense_frames, 2.0)

    def faithfulness(self, read: Verdict) -> float:
        """Share of attributes that are read as asked; an unreadable one is not."""
        right = faithfulness(read, self.asked.scene)
        return sum(right.values()) / len(right)

    def to_dict(self) -> dict[str, Any]:
        attributes = {
            name: {
                "asked": getattr(self.asked.scene, name),
                "read": self.read.attributes[name],
                "dense": self.read_dense.attributes[name],
            }
            for name in world.ATTRIBUTES
        }
        return {
            "name": self.asked.name,
            "prompt": self.asked.prompt,
            "seed": self.asked.seed,
            "expected": self.asked.expected,
            "report": self.clip.report.to_dict(),
            "faithfulness": self.faithfulness(self.read),
            "faithfulness_dense": self.faithfulness(self.read_dense),
            "attributes": attributes,
            "psnr": round(self.psnr, 2),
            "bit_equal": self.bit_equal,
            "seconds": round(self.seconds, 3),
        }


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        description="Seven requests to the embedded model from an empty bank: a cold one, the same again, three that"
        " differ in one word, a new scene, another seed. Writes report.json, the clips and report.html. Exit code 1"
        " when a decision is not the one that its request is there to show.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where everything goes")
    add_options(parser)
    add_json_option(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    usable_folder(parser.error, "--out", args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    with Bank(args.out / BANK) as bank:
        for info in bank.ls():
            bank.remove(info.id)
        shown = play(generator(bank), args.size, args.steps)
    data = {"size": args.size, "steps": args.steps, "runs": write(args.out, shown)}
    (args.out / "report.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    (args.out / "report.html").write_text(page(shown, args.size, args.steps), encoding="utf-8")
    if args.json:
        print_json(data)
    else:
        for one in shown:
            print(f"{one.asked.name:14} {one.clip.report.summary()}")
        print(args.out / "report.html")
    unexpected = [one for one in shown if not one.as_expected]
    for one in unexpected:
        say(f"{one.asked.name}: {one.asked.expected} was to be shown, and the decision was {one.clip.report.decision}")
    return FAILED if unexpected else OK


def play(make: Generator, size: int, steps: int) -> list[Shown]:
    """All requests in order, each followed by what it would have been without a bank."""
    dense: dict[tuple[str, int], tuple[torch.Tensor, Verdict]] = {}
    apart = {(asked.prompt, asked.seed) for asked in SCRIPT}
    shown = []
    with progress((len(SCRIPT) + len(apart)) * steps, "demo") as bar:
        for asked in SCRIPT:
            before, started = bar.n, time.perf_counter()
            clip = make(asked.prompt, asked.seed, size, steps, on_step=lambda *_: bar.update())
            seconds = time.perf_counter() - started
            bar.update(before + steps - bar.n)  # an exact result takes no steps
            key = asked.prompt, asked.seed
            if key not in dense:
                truth = sample.sample(make.model, [key[0]], [key[1]], size, steps, on_step=lambda *_: bar.update())
                dense[key] = truth, judge(codec.decode(truth)[0])
            truth, read_dense = dense[key]
            shown.append(Shown(asked, clip, truth, judge(clip.frames), read_dense, seconds))
    return shown


def write(folder: Path, shown: list[Shown]) -> list[dict[str, Any]]:
    """The clips as files; returns the rows of report.json."""
    rows = []
    for number, one in enumerate(shown, start=1):
        name = f"{number}-{one.asked.name.replace(' ', '-')}"
        files = media.write_all(folder, name, one.clip.frames)
        files_dense = media.write_all(folder, f"{name}-dense", one.dense_frames)
        rows.append({**one.to_dict(), "files": files, "files_dense": files_dense})
    return rows
