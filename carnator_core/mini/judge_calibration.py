"""Where the judge's tolerances come from: truth and corruptions of it, rendered and measured.

python -m carnator_core.mini.judge_calibration --renders 400 [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from . import seeds, world
from .judge import TOLERANCES, Measures, faithfulness, measure, verdict_on
from .judge_pixels import blur
from .world import ATTRIBUTES, FRAMES, Scene

Corruption = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Generator], torch.Tensor]


def _over_time(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    share = torch.linspace(0, 1, FRAMES).view(1, -1, 1, 1)
    return a * (1 - share) + b * share


def _left_right(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    half = a.shape[-1] // 2
    return torch.cat((a[..., :half], b[..., half:]), -1)


def _shuffled(a: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    order = list(range(FRAMES))
    while order == list(range(FRAMES)):
        order = torch.randperm(FRAMES, generator=g).tolist()
    return a[:, order]


def _noisy(a: torch.Tensor, deviation: float, g: torch.Generator) -> torch.Tensor:
    return (a + deviation * torch.randn(a.shape, generator=g)).clamp(-1, 1)


def _lit(a: torch.Tensor, gain: float) -> torch.Tensor:
    return ((a + 1) * gain - 1).clamp(-1, 1)


# Each gets a clip, a clip of another scene, a clip of the same scene from another seed, and a generator.
CORRUPTIONS: dict[str, Corruption] = {
    "blend of two scenes": lambda a, b, c, g: 0.5 * a + 0.5 * b,
    "fade over time": lambda a, b, c, g: _over_time(a, b),
    "half of another scene": lambda a, b, c, g: _left_right(a, b),
    "half of another seed": lambda a, b, c, g: _left_right(a, c),
    "frozen": lambda a, b, c, g: a[:, 2:3].expand_as(a),
    "one frame twice": lambda a, b, c, g: a[:, [0, 0, 1, 2, 3]],
    "shuffled frames": lambda a, b, c, g: _shuffled(a, g),
    "strong noise": lambda a, b, c, g: _noisy(a, 0.5, g),
    "pure noise": lambda a, b, c, g: _noisy(a * 0, 0.6, g),
    "grey": lambda a, b, c, g: a * 0,
}
NEEDS_MOVEMENT = ("frozen", "one frame twice", "shuffled frames")  # these leave a resting scene as it is
HARMLESS: dict[str, Corruption] = {
    "slightly soft": lambda a, b, c, g: blur(a, 0.5),
    "slightly noisy": lambda a, b, c, g: _noisy(a, 0.03, g),
    "3 % brighter": lambda a, b, c, g: _lit(a, 1.03),
    "3 % darker": lambda a, b, c, g: _lit(a, 0.97),
}


def moves(scene: Scene) -> bool:
    """Whether the frames of a scene differ."""
    return scene.motion != "still" or scene.camera != "steady"


@dataclass(frozen=True)
class Case:
    """One corrupted clip (3, T, size, size), and the scenes that it was made of."""

    clip: torch.Tensor
    scenes: tuple[Scene, ...]


def cases(name: str, count: int, size: int, seed: int, neighbours: bool = False) -> list[Case]:
    """`count` clips with the named corruption (or harmless change); the other scene differs in one word or is any."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    change = (CORRUPTIONS | HARMLESS)[name]
    out: list[Case] = []
    while len(out) < count:
        scene = world.random_scene(rng, "calibrate")
        other = world.one_word_neighbour(scene, rng)[1] if neighbours else world.random_scene(rng, "calibrate")
        if other == scene or (name in NEEDS_MOVEMENT and not moves(scene)):
            continue
        a, b, c = world.render((scene, other, scene), seed + 3 * len(out), size)
        scenes = (scene, other) if name in CORRUPTIONS else (scene,)
        out.append(Case(change(a, b, c, generator), scenes))
    return out


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Smallest, 5 %, median, 95 % and largest of the values, rounded."""
    ranked = sorted(values)
    places = {"min": 0.0, "p5": 0.05, "median": 0.5, "p95": 0.95, "max": 1.0}
    return {name: round(ranked[round(q * (len(ranked) - 1))], 4) for name, q in places.items()}


def _distributions(found: Sequence[Measures]) -> dict[str, dict[str, float]]:
    return {name: _spread([getattr(m, name) for m in found]) for name in TOLERANCES}


def truth_report(count: int, size: int, seed: int) -> dict:
    """How well rendered truth is read: share right by attribute, worst fits, every measure's distribution."""
    rng = random.Random(seed)
    scenes = [world.random_scene(rng, "calibrate") for _ in range(count)]
    clips = list(world.render(scenes, seed, size))
    start = time.perf_counter()
    found = [measure(clip) for clip in clips]
    spent = time.perf_counter() - start
    verdicts = [verdict_on(m) for m in found]
    right = [faithfulness(v, s) for v, s in zip(verdicts, scenes, strict=True)]
    return {
        "size": size,
        "clips": count,
        "milliseconds": round(1000 * spent / count, 1),
        "right": {name: round(sum(r[name] for r in right) / count, 4) for name in ATTRIBUTES},
        "all_right": round(sum(all(r.values()) for r in right) / count, 4),
        "worst_fit_error": round(max(v.fit_error for v in verdicts), 4),
        "worst_pattern_fit": round(min(v.pattern_fit for v in verdicts), 4),
        "measures": _distributions(found),
    }


def change_report(name: str, count: int, size: int, seed: int, neighbours: bool) -> dict:
    """How many changed clips pass as fully right for one of their scenes, and every measure's distribution."""
    made = cases(name, count, size, seed, neighbours)
    found = [measure(case.clip) for case in made]
    verdicts = [verdict_on(m) for m in found]
    passed = [any(all(faithfulness(v, s).values()) for s in c.scenes) for v, c in zip(verdicts, made, strict=True)]
    return {
        "size": size,
        "change": name + (", one word apart" if neighbours else ""),
        "clips": count,
        "accepted": round(sum(passed) / count, 4),
        "measures": _distributions(found),
    }


def report(count: int, sizes: Sequence[int]) -> dict:
    """Everything behind `TOLERANCES`, on seeds and scenes of the calibration split."""
    seed = seeds.CALIBRATE.start
    kinds = [(name, False) for name in (*HARMLESS, *CORRUPTIONS)]
    kinds += [(name, True) for name in ("blend of two scenes", "fade over time", "half of another scene")]
    fewer = max(1, count // 4)
    return {
        "tolerances": {name: f"at {sense} {bound:g}" for name, (sense, bound) in TOLERANCES.items()},
        "truth": [truth_report(count, size, seed) for size in sizes],
        "changes": [change_report(name, fewer, size, seed, near) for size in sizes for name, near in kinds],
    }


def _print_measures(measures: dict[str, dict[str, float]]) -> None:
    for name, spread in measures.items():
        print(f"    {name:12}", "  ".join(f"{place} {value:8.4f}" for place, value in spread.items()))


def _print_report(found: dict) -> None:
    for name, bound in found["tolerances"].items():
        print(f"tolerance  {name:12} {bound}")
    for truth in found["truth"]:
        print(f"\ntruth, size {truth['size']}, {truth['clips']} clips, {truth['milliseconds']} ms a clip")
        print("    right", "  ".join(f"{name} {share:.2%}" for name, share in truth["right"].items()))
        print(f"    worst fit error {truth['worst_fit_error']}, worst pattern fit {truth['worst_pattern_fit']}")
        _print_measures(truth["measures"])
    for change in found["changes"]:
        print(f"\n{change['change']}, size {change['size']}, {change['clips']} clips", end=": ")
        print(f"{change['accepted']:.1%} accepted as fully right")
        _print_measures(change["measures"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m carnator_core.mini.judge", description="Reprint what the judge's tolerances were derived from."
    )
    parser.add_argument("--renders", type=int, default=400, help="clips of truth per size; a quarter per corruption")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64], help="sides of the clips in pixels")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = parser.parse_args(arguments)
    if options.renders < 1:
        parser.error("--renders must be at least 1")
    torch.set_num_threads(1)
    found = report(options.renders, options.sizes)
    print(json.dumps(found, indent=2)) if options.json else _print_report(found)


if __name__ == "__main__":
    main()
