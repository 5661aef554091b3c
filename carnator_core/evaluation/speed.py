"""How fast exactly one plan runs: `bench speed --plan plan.json --tokens 4680` (a plan as `bench quality` writes it).

The pipeline itself runs, bank, probe and gate included, at the given number of tokens: dense, with the whole plan, and
with its skipped steps alone, in turn, and medians of ratios count. What a clip shows plays no part: the plan and the
size of its region are forced; the faithfulness is what `bench quality` measured with this plan, on the embedded model.
`--backbone wan-1.3b --device cuda` takes real widths with random weights.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..attention.connectivity import Connectivity
from ..backbones import REAL_WIDTHS
from ..bank import Bank
from ..grid import TokenGrid
from ..mini import model as mini
from ..mini import sample, world
from ..pipelines import Clip, Generator
from ..reuse.plan import Plan
from ..reuse.scope import scope_of

TARGET = world.Scene("ball", "red", "forest", "left", "large", "steady", "one")
SEED = 7


@dataclass(frozen=True)
class Timed:
    """A plan, the share of tokens that its region steps compute, the attention mass that its full steps keep, and the
    quality that was measured with it."""

    plan: Plan
    active: float | None
    kept: float | None
    quality: dict[str, float]


def plan_of(path: Path, name: str | None) -> Timed:
    """ValueError for a file without that plan."""
    try:
        plans = {key: plan for key, plan in json.loads(path.read_text())["plans"].items() if plan}
        name = name or next(iter(plans))
        rows, active, kept, quality = (plans[name][key] for key in ("steps", "active", "kept", "quality"))
        kinds = [row["kind"] for row in rows]
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise ValueError(f"{path} holds no plan {name or ''}: {error!r}; write one with `bench quality`") from error
    chosen = {kind: frozenset(i for i, k in enumerate(kinds) if k == kind) for kind in ("skipped", "region")}
    return Timed(Plan(tuple(sample.sigmas(len(kinds))[:-1].tolist()), **chosen), active, kept, quality)


def latent_of(tokens: int) -> tuple[int, int, int]:
    """Sides of a square latent of the embedded model's length with at least so many tokens."""
    side = 2 * math.ceil(math.sqrt(tokens / world.FRAMES))
    return world.FRAMES, side, side


def region_of(grid: TokenGrid, active: float) -> torch.Tensor:
    """A square region, the same in every frame, whose scope holds about this share of the tokens."""
    best = None
    for side in range(1, grid.h + 1):
        region = torch.zeros(grid.t, grid.h, grid.w, dtype=torch.bool)
        start = (grid.h - side) // 2
        region[:, start : start + side, start : start + side] = True
        scope = scope_of(region, grid)
        if scope is not None and (best is None or abs(scope.active_share - active) < best[0]):
            best = abs(scope.active_share - active), region
    if best is None:
        raise ValueError(f"no region fits a grid of {grid.h} rows")
    return best[1]


def timed(call: Callable[[], Clip]) -> tuple[float, int | None, Clip]:
    """Seconds, the most bytes that were allocated on a GPU meanwhile (None on a CPU), and the clip."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    clip = call()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started, torch.cuda.max_memory_allocated() if gpu else None, clip


def model_of(backbone: str, device: str) -> torch.nn.Module:
    """ValueError for real widths on a CPU, where a figure would take hours and tell nothing."""
    if backbone == "embedded":
        return mini.load().to(device)
    if device == "cpu":
        raise ValueError(f"{backbone} has real widths; time it with --device cuda")
    torch.manual_seed(0)
    with torch.device(device):
        return mini.build(**REAL_WIDTHS[backbone]).to(torch.bfloat16).train(False).requires_grad_(False)


def measure(model: torch.nn.Module, wanted: Timed, tokens: int, repeats: int) -> dict:
    """The figures that the command prints, ratios of runs in turn."""
    plan = wanted.plan
    latent = latent_of(tokens)
    grid = TokenGrid.of_latent(latent)
    region = region_of(grid, wanted.active) if plan.region else None
    steps = len(plan.sigmas)
    prompt, other = world.caption(TARGET), world.caption(TARGET.changed(colour="yellow"))
    with tempfile.TemporaryDirectory() as folder, Bank(folder) as bank:
        make, alone = Generator(bank, model=model), Generator(Bank(folder, mode="off"), model=model)
        spent, _, cold = timed(lambda: make(prompt, SEED, steps=steps, latent=latent))
        own = cold.report.seconds["carnator"]
        found: dict[str, list[tuple[float, float]]] = {"dense": [], "joint": [], "skip_only": []}
        peaks: dict[str, int | None] = {}
        for _ in range(repeats):
            runs = {
                "dense": lambda: alone(other, SEED, steps=steps, latent=latent),
                "joint": lambda: _reused(make, other, cold, wanted, latent, region),
                "skip_only": lambda: _reused(make, other, cold, _skips_of(wanted), latent, None),
            }
            if not plan.skipped:  # without its regions such a plan is the full run
                del runs["skip_only"]
            for name, run in runs.items():
                seconds, peaks[name], clip = timed(run)
                found[name].append((seconds, clip.report.seconds["model"]))
                if name == "joint":
                    last = clip
    if not plan.skipped:
        found["skip_only"], peaks["skip_only"] = found["dense"], peaks["dense"]
    ratios = {
        name: [
            statistics.median(dense[i] / mine[i] for dense, mine in zip(found["dense"], found[name], strict=True))
            for i in (0, 1)
        ]
        for name in ("joint", "skip_only")
    }
    return {
        "tokens": grid.tokens,
        "steps": steps,
        "dit_speedup": round(ratios["joint"][1], 3),
        "e2e_speedup": round(ratios["joint"][0], 3),
        "skip_only_speedup": round(ratios["skip_only"][1], 3),
        "joint_speedup": round(ratios["joint"][1] / ratios["skip_only"][1], 3),
        "miss_overhead": round(own / (spent - own), 4),
        "parts": {name: round(seconds, 3) for name, seconds in last.report.seconds.items()},
        "peak_memory": peaks,
        "plan": str(plan),
        "faithfulness": wanted.quality["faithfulness"],
        "faithfulness_dense": wanted.quality["faithfulness_dense"],
        "hits": wanted.quality["hits"],
        "cost": round(last.report.forwards, 2),
        "active": last.report.scope.active,
        "density": last.report.scope.density,
        "notes": last.report.warnings,
    }


def _skips_of(wanted: Timed) -> Timed:
    """The same plan without regions and sparse attention."""
    return replace(wanted, plan=replace(wanted.plan, region=frozenset()), active=None, kept=None)


def _reused(
    make: Generator, prompt: str, cold: Clip, wanted: Timed, latent: tuple, region: torch.Tensor | None
) -> Clip:
    how = dict(forced=wanted.plan, region=region, sparse=Connectivity(wanted.kept) if wanted.kept else None)
    clip = make(prompt, SEED, steps=len(wanted.plan.sigmas), latent=latent, donor=cold.report.written, **how)
    if clip.report.decision != "joint":
        raise RuntimeError(f"the plan did not run: {clip.report.reason}")
    return clip


def add_parser(subparsers) -> argparse.ArgumentParser:
    """The `speed` command below `bench`."""
    parser = subparsers.add_parser("speed", help="how fast exactly one plan runs")
    parser.add_argument("--plan", type=Path, required=True, help="plan.json of `bench quality`")
    parser.add_argument("--name", help="which of its plans (default: the first that has a hit)")
    parser.add_argument("--tokens", type=int, default=4680)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--backbone", choices=("embedded", *REAL_WIDTHS), default="embedded")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=command)
    return parser


def command(options: argparse.Namespace) -> int:
    """Returns the exit code; ValueError for a bad plan or number."""
    if options.tokens < 80 or options.repeats < 1:
        raise ValueError("--tokens must be at least 80 and --repeats at least 1")
    wanted = plan_of(options.plan, options.name)
    model = model_of(options.backbone, options.device)
    real = options.backbone != "embedded"
    with torch.autocast(options.device, torch.bfloat16, enabled=real), torch.no_grad():
        found = measure(model, wanted, options.tokens, options.repeats)
    found["backbone"] = options.backbone
    print(json.dumps(found) if options.json else "\n".join(f"{name:18} {value}" for name, value in found.items()))
    return 0
