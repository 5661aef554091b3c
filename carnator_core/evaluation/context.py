"""What a region step may see of the tokens that it does not compute: `bench context`.

Every pair runs along a plan with a donor's answers. At each full step behind skipped ones the region's prediction is
made too, in each of these ways, from what the full step before left behind, and compared with the full step's own where
W is above one half (root mean square, in deviations of the prediction):

answer      no model call at all, what a skipped step would take
alone       the region and a band of context three tokens wide, as a clip of its own (paper, section 3.3)
pooled      the region; of the others, keys and values pooled over 2 x 2 tokens
remembered  the region; of the others, keys and values as they were (`reuse.context`)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from tqdm import tqdm

from .. import backbones
from ..grid import TokenGrid, dilate
from ..mini.evaluate import GRIDS
from ..reuse.answer import DonorAnswer
from ..reuse.context import Context
from ..reuse.correction import CorrectedAnswer
from ..reuse.plan import Plan
from ..reuse.region import RegionSteps
from ..reuse.trajectory import Trajectory
from .bench import plan_named
from .methods import Case
from .options import add_case_options, add_pair_options, check, load_model
from .traces import Pair, pairs

BAND = 3  # tokens of context on the paper's grid of 22 rows


class Alone(Context):
    """Nothing but the computed tokens."""

    def __init__(self, memory: Context):
        super().__init__(memory.depth)
        self.memory = memory

    def knows(self, forward):
        return self.memory.knows(forward)

    def around(self, forward, layer, index, k, v, text):
        return k, v


class Pooled(Alone):
    """The others pooled; each mean counts as often as there are tokens in it."""

    def __init__(self, memory: Context, grid: TokenGrid):
        super().__init__(memory)
        self.grid = grid

    def around(self, forward, layer, index, k, v, text):
        left = torch.ones(self.grid.tokens)
        left[index] = 0
        kept = zip(self.memory.remembered(forward, layer), (k, v), strict=True)
        rows = [torch.cat((new, self._means(old, left)), -2) for old, new in kept]
        return rows[0], rows[1]

    def _means(self, x: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """(b, heads, s, d) -> (b, heads, tokens left, d)."""
        sides = self.grid.t, self.grid.h, self.grid.w
        weight = left.view(1, 1, *sides)
        field = x.transpose(-1, -2).reshape(-1, 1, *sides) * weight
        cell = (1, 2, 2)
        mean = F.avg_pool3d(field, cell, ceil_mode=True) / F.avg_pool3d(weight, cell, ceil_mode=True).clamp_min(1e-6)
        mean = F.interpolate(mean, scale_factor=tuple(map(float, cell)))[..., : sides[1], : sides[2]]
        return mean.reshape(*x.shape[:2], x.shape[3], -1).transpose(-1, -2)[..., left > 0, :]


def measure_pair(model: torch.nn.Module, pair: Pair, size: int, plan: Plan) -> list[dict[str, float]]:
    """One row for each full step behind skipped ones at which there was a region."""
    case, backbone, layers = Case.of(model, [pair], size, plan), backbones.find(model), len(model.blocks)
    donor = Trajectory(plan.sigmas, case.donor_x0)
    answers = CorrectedAnswer(DonorAnswer(donor, case.grid), plan)
    regions = RegionSteps(layers, case.grid)
    window, memory = regions.window, regions.window.context
    ways = {"alone": Alone(memory), "pooled": Pooled(memory, case.grid)}
    ways["remembered"] = memory  # last, as it writes

    def through(way: Context, sigma: float, x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
        window.context = way
        window.begin(index)
        with backbone.windowed(model, window):
            return case.wanted.x0(x, sigma)

    regions.follow(donor)
    x, levels, rows = case.noise, [*plan.sigmas, 0.0], []
    for i, sigma in enumerate(plan.sigmas):
        if plan.kind(i) == "skipped":
            x0 = answers.answer(sigma)
        else:
            found: dict[str, torch.Tensor] = {}
            if i - 1 in plan.skipped and regions.scope is not None:
                scope = regions.scope
                band = dilate(scope.active, case.grid.scaled(BAND)).flatten().nonzero().flatten()
                chosen = {"alone": band}
                found = {name: through(way, sigma, x, chosen.get(name, scope.index)) for name, way in ways.items()}
                found["answer"] = answers.plain.answer(sigma)
            x0 = through(memory, sigma, x, None)
            if found:
                place, spread = (regions.weight > 0.5).expand_as(x0), x0.std()
                off = {name: float((y - x0)[place].pow(2).mean().sqrt() / spread) for name, y in found.items()}
                rows.append(off | {"active": scope.active_share, "band": len(band) / case.grid.tokens})
            answers.observe(sigma, x0)
            regions.look(sigma, x0)
        x = x0 + (levels[i + 1] / sigma) * (x - x0)
    return rows


def table(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(sum(row[name] for row in rows) / len(rows), 4) for name in rows[0]} if rows else {}


def add_parser(subparsers) -> argparse.ArgumentParser:
    """The `context` command below `bench`."""
    parser = subparsers.add_parser("context", help="what a region step must see of the rest of the clip")
    add_pair_options(parser, pairs=8, grid="large", split="fit")
    add_case_options(parser)
    parser.add_argument("--plan", default="even-14", help="as of `bench reuse`")
    parser.set_defaults(run=command)
    return parser


@torch.no_grad()
def command(options: argparse.Namespace) -> int:
    """Returns the exit code; ValueError for a bad plan."""
    check(options)
    model, plan = load_model(options), plan_named(options.plan, options.steps)
    rows: list[dict[str, float]] = []
    for pair in tqdm(pairs(options.split, options.kind, options.pairs, options.seed), disable=not sys.stderr.isatty()):
        rows += measure_pair(model, pair, GRIDS[options.grid], plan)
    told = {n: getattr(options, n) for n in ("pairs", "kind", "grid", "steps", "split", "seed", "dtype", "plan")}
    off = table(rows)
    result = {**told, "steps_measured": len(rows), "off": off}
    print(json.dumps(result) if options.json else "\n".join(f"{name:12} {value}" for name, value in off.items()))
    return 0
