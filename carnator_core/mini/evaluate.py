"""How well the embedded model does what its prompts ask, read by the judge.

python -m carnator_core.mini.evaluate --captions 200 [--grid small|large] [--steps 50 | --few-step] [--json]

Captions are of the proof split, never seen in training. `best_guess` is the mean over the most likely readings, before
the judge asks whether a clip fits well enough to be read at all. `unsafe_null` is how often a reading flips between 50
and 46 dense steps of the same request: the noise floor of every claim about reuse. `headroom` (large grid) is what a
donor has to give, see `headroom()`. `--few-step` evaluates the few-step companion, which leaves no steps to compare
with: these two figures are then empty. `fit_error` is the median.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from . import codec, few_step, sample, world
from . import model as mini
from .judge import Measures, Verdict, faithfulness, measure, verdict_on
from .precision import add_precision_option, multiplying_in
from .seeds import PROOF, RANGES

GRIDS = {"small": 32, "large": 64}
NULL_SHARE = 46 / 50  # steps of the second dense run that unsafe_null compares with
BATCH = {32: 8, 64: 2}


def draw(count: int, split: str, seed: int) -> list[tuple[world.Scene, str, int]]:
    """(scene, prompt, noise seed) of `count` requests of a split."""
    rng = random.Random(seed)
    first = RANGES[split].start + seed * 10_000
    scenes = [world.random_scene(rng, split) for _ in range(count)]
    return [(s, world.caption(s, rng.randrange(len(world.PHRASINGS))), first + i) for i, s in enumerate(scenes)]


def clips(
    model,
    requests: Sequence[tuple[world.Scene, str, int]],
    size: int,
    steps: int,
    note: str,
    guidance: float = sample.GUIDANCE,
) -> list[torch.Tensor]:
    """Decoded clips (3, T, size, size) of all requests."""
    out: list[torch.Tensor] = []
    batch = BATCH[size]
    for i in tqdm(range(0, len(requests), batch), desc=note, disable=not sys.stderr.isatty()):
        part = requests[i : i + batch]
        prompts, seeds = [p for _, p, _ in part], [s for _, _, s in part]
        latents = sample.sample(model, prompts, seeds, size=size, steps=steps, guidance=guidance)
        out.extend(codec.decode(latents))
    return out


def scores(verdicts: Sequence[Verdict], scenes: Sequence[world.Scene]) -> dict[str, float]:
    """Share of right readings by attribute."""
    right = [faithfulness(v, s) for v, s in zip(verdicts, scenes, strict=True)]
    return {name: sum(r[name] for r in right) / len(right) for name in world.ATTRIBUTES}


def readings(found: Sequence[torch.Tensor]) -> list[Measures]:
    """The judge's measures of every clip; a clip with numbers that are not finite shows nothing."""
    return [measure(c) if c.isfinite().all() else Measures(dict.fromkeys(world.ATTRIBUTES)) for c in found]


def guesses(measures: Sequence[Measures], scenes: Sequence[world.Scene]) -> float:
    """Share of attributes whose most likely reading is right, however bad the fit: progress before clips are clean."""
    right = [m.words[n] == getattr(s, n) for m, s in zip(measures, scenes, strict=True) for n in world.ATTRIBUTES]
    return sum(right) / len(right)


def flips(first: Sequence[Verdict], second: Sequence[Verdict]) -> float:
    """Share of attribute readings that differ between two runs of the same requests."""
    pairs = [(a.attributes[n], b.attributes[n]) for a, b in zip(first, second, strict=True) for n in world.ATTRIBUTES]
    return sum(a != b for a, b in pairs) / len(pairs)


def unchanged_area(scene: world.Scene, other: world.Scene, size: int) -> torch.Tensor:
    """Latent positions (T, h, w) that no object of either scene can touch, wherever the noise puts it."""
    touched, middle = torch.zeros(world.FRAMES, size, size), size / world.UNIT / 2
    for s in (scene, other):
        for dx in (-world.JITTER, 0.0, world.JITTER):
            for dy in (-world.JITTER, 0.0, world.JITTER):
                axis = world.standing_axis(s)
                cover = world.coverage(s.changed(object="ball"), (middle + dx, middle + dy), axis, 1.1, size)
                touched = torch.maximum(touched, cover)
    return torch.nn.functional.max_pool2d(touched, codec.BLOCK) == 0


def psnr(error: torch.Tensor, peak: float) -> float:
    return 10 * math.log10(peak**2 / max(error.pow(2).mean().item(), 1e-12))


def headroom(model, pairs: int, size: int, steps: int, seed: int) -> float:
    """Mean PSNR gain in dB of a donor's prediction over the target's own frozen one, in the unchanged area.

    One-word pairs (colour, object or size) with the same noise. At half of the schedule, the target's own dense
    prediction is the truth; compared are the donor's prediction there and the target's own after step 4.
    """
    rng = random.Random(seed)
    gains = []
    for i in tqdm(range(pairs), desc="headroom", disable=not sys.stderr.isatty()):
        target = world.random_scene(rng, "proof")
        _, donor = world.one_word_neighbour(target, rng, rng.choice(("colour", "object", "size")))
        kept: dict[int, torch.Tensor] = {}

        def keep(step: int, sigma: float, x0: torch.Tensor, kept: dict[int, torch.Tensor] = kept) -> None:
            if step in (3, steps // 2):
                kept[step] = x0

        prompts = [world.caption(target), world.caption(donor)]
        sample.sample(model, prompts, [PROOF.start + seed * 10_000 + i] * 2, size=size, steps=steps, on_step=keep)
        area = unchanged_area(target, donor, size)
        truth, lent, frozen = kept[steps // 2][0][:, area], kept[steps // 2][1][:, area], kept[3][0][:, area]
        peak = 2 * codec.SCALE
        gains.append(psnr(lent - truth, peak) - psnr(frozen - truth, peak))
    return sum(gains) / len(gains)


def evaluate(
    model,
    captions: int,
    grid: str,
    steps: int,
    seed: int,
    split: str = "proof",
    pairs: int = 12,
    few: bool = False,
) -> dict:
    """The figures that the command prints; `few` samples as `few_step` does, whatever `steps` says."""
    steps, guidance = (few_step.STEPS, few_step.GUIDANCE) if few else (steps, sample.GUIDANCE)
    size = GRIDS[grid]
    requests = draw(captions, split, seed)
    scenes = [s for s, _, _ in requests]
    measures = readings(clips(model, requests, size, steps, f"{steps} steps", guidance))
    verdicts = [verdict_on(m) for m in measures]
    null = None
    if not few:
        fewer = round(steps * NULL_SHARE)
        second = [verdict_on(m) for m in readings(clips(model, requests, size, fewer, f"{fewer} steps"))]
        null = flips(verdicts, second)
    by_attribute = scores(verdicts, scenes)
    result = {
        "mean": sum(by_attribute.values()) / len(by_attribute),
        "by_attribute": by_attribute,
        "best_guess": guesses(measures, scenes),
        "unreadable": sum(None in v.attributes.values() for v in verdicts) / len(verdicts),
        "fit_error": statistics.median(v.fit_error for v in verdicts),
        "unsafe_null": null,
        "headroom": headroom(model, pairs, size, steps, seed) if grid == "large" and pairs and not few else None,
        "captions": captions,
        "grid": grid,
        "steps": steps,
        "seed": seed,
    }
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="carnator_core.mini.evaluate", description=__doc__.split("\n\n")[0])
    parser.add_argument("--captions", type=int, default=200)
    parser.add_argument("--grid", choices=GRIDS, default="small")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--few-step", action="store_true", help=f"{few_step.STEPS} unguided steps with the few-step LoRA"
    )
    parser.add_argument("--lora", type=Path, default=few_step.LORA, help="the LoRA of --few-step")
    parser.add_argument("--seed", type=int, default=0, help="0 to 99: which captions and noises of the split")
    parser.add_argument("--split", choices=RANGES, default="proof")
    parser.add_argument("--pairs", type=int, default=12, help="one-word pairs for the headroom on the large grid")
    parser.add_argument("--weights", type=Path, default=mini.WEIGHTS)
    add_precision_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args(argv)
    if options.captions < 1 or not 0 <= options.seed < 100:
        parser.error("--captions must be at least 1 and --seed from 0 to 99")
    model = few_step.load(options.weights, options.lora) if options.few_step else mini.load(options.weights)
    result = evaluate(
        multiplying_in(model, options.dtype),
        options.captions,
        options.grid,
        options.steps,
        options.seed,
        options.split,
        options.pairs,
        options.few_step,
    )
    result |= {"split": options.split, "dtype": options.dtype}
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:14} {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
