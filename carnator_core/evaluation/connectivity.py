"""Whose attention mask fits a target best: `bench connectivity` compares sources at equal density.

python -m carnator_core bench connectivity [--pairs 8] [--kind one-word seed-only] [--density 0.3 0.15] [--json]

own      the target's own probe, one mask for the rest of the run
donor    the donor's attention at the very step, as the paper stores it
average  an offline mean over requests of the fit split, at the very step
truth    the target's own attention at the very step: what no source can beat

Coverage is the share of the target's true softmax mass inside the kept blocks, over all rows; the output error is the
relative root mean square distance of the attention's output from the dense one. Both are means over layers, guidance
branches and pairs. The first layer stays dense in a run and is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tqdm import tqdm

from .. import backbones
from ..attention.blocks import BlockMask, block_mass, default_blocks, sample_rows, top_mask
from ..attention.choice import Dense
from ..attention.connectivity import FIRST_DENSE
from ..attention.coverage import coverage
from ..mini import model as mini
from ..mini import sample, world
from ..mini.evaluate import GRIDS
from ..mini.seeds import FIT
from ..schedule import probe_steps
from .metrics import interval, rounded
from .options import add_pair_options, check
from .traces import KINDS, pairs
from .walk import Prompted

SOURCES = ("own", "donor", "average", "truth")
LOOKED_AT = (0.25, 0.5, 0.75)  # shares of the schedule at which coverage is measured
AVERAGED = 6  # requests behind the offline average

Place = tuple[int, int]  # guidance branch, layer
Mass = dict[Place, torch.Tensor]  # of key blocks, (heads, query blocks, key blocks)


@dataclass
class Seen:
    """One run's attention: `mass` by step, from sampled rows; `qkv` by step, (heads, tokens, d) each, if kept."""

    mass: dict[int, Mass]
    qkv: dict[int, dict[Place, tuple[torch.Tensor, ...]]]
    keep: bool = False

    def reader(self, step: int) -> Callable:
        """What stands in for attention at one step: reads, and lets the model's own answer."""
        mass, qkv = self.mass.setdefault(step, {}), self.qkv.setdefault(step, {})

        def attend(layer: int, dense: Dense, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, text=None):
            blocks = default_blocks(q.shape[2])
            for branch in range(len(q)) if layer >= FIRST_DENSE else ():
                rows = sample_rows(q.shape[2], blocks[0])
                mass[branch, layer] = block_mass(q[branch], k[branch], rows, blocks[1], None)
                if self.keep:
                    qkv[branch, layer] = (q[branch], k[branch], v[branch])
            return dense(q, k, v)

        return attend


@torch.no_grad()
def look(model, prompt: str, seed: int, size: int, steps: int, wanted: Sequence[int], keep: bool = False) -> Seen:
    """Sample densely, as far as the last wanted step, and read the attention of the wanted ones."""
    seen, backbone = Seen({}, {}, keep), backbones.find(model)
    prompted, x, levels = Prompted(model, [prompt]), sample.noise([seed], size), sample.sigmas(steps).tolist()
    for i in range(max(wanted) + 1):
        with backbone.attending(model, seen.reader(i)) if i in wanted else nullcontext():
            x0 = prompted.x0(x, levels[i])
        x = x0 + (levels[i + 1] / levels[i]) * (x - x0)
    return seen


def average(model, size: int, steps: int, wanted: Sequence[int]) -> dict[int, Mass]:
    """The mean mass of `AVERAGED` requests of the fit split at the wanted steps."""
    rng = random.Random(0)
    runs = []
    for i in range(AVERAGED):
        prompt = world.caption(world.random_scene(rng, "fit"), i % len(world.PHRASINGS))
        runs.append(look(model, prompt, FIT.start + 700_000 + i, size, steps, wanted).mass)
    return {s: {place: sum(run[s][place] for run in runs) / len(runs) for place in runs[0][s]} for s in wanted}


def output_error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> float:
    """Relative root mean square distance of masked from dense attention; q, k, v (heads, tokens, d)."""
    dense = F.scaled_dot_product_attention(q[None], k[None], v[None])
    masked = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask.elements()[None])
    return float((masked - dense).norm() / dense.norm().clamp_min(1e-12))


def compared(target: Seen, probe: int, sources: dict[str, dict[int, Mass]], densities: Sequence[float]) -> list[dict]:
    """One row a step, source and density: coverage, the worst head's, and the output error."""
    rows = []
    for step in (s for s in target.qkv if s != probe):
        for density in densities:
            for name, mass in sources.items():
                found = [_fit(qkv, mass[step][place], density) for place, qkv in target.qkv[step].items()]
                covers, worst, errors = zip(*found, strict=True)
                row = {"source": name, "density": density, "step": step, "coverage": sum(covers) / len(covers)}
                rows.append(row | {"worst_head": min(worst), "output_error": sum(errors) / len(errors)})
    return rows


def _fit(qkv: tuple[torch.Tensor, ...], mass: torch.Tensor, density: float) -> tuple[float, float, float]:
    q, k, v = qkv
    tokens = (q.shape[1], k.shape[1])
    mask = top_mask(mass, density, default_blocks(tokens[0]), tokens)
    covered = coverage(q, k, mask, rows=1)
    return covered.mean, covered.worst, output_error(q, k, v, mask)


def table(rows: Sequence[dict]) -> list[dict]:
    """Means over steps and pairs with 95 % intervals over pairs, and own less donor."""
    lines = []
    keys = list(dict.fromkeys((r["kind"], r["density"], r["source"]) for r in rows))
    for kind, density, source in keys:
        mine = [r for r in rows if (r["kind"], r["density"], r["source"]) == (kind, density, source)]
        by_pair = [[r for r in mine if r["pair"] == p] for p in sorted({r["pair"] for r in mine})]
        line = {"kind": kind, "density": density, "source": source, "pairs": len(by_pair)}
        for name in ("coverage", "output_error"):
            line[name] = rounded(interval([sum(r[name] for r in part) / len(part) for part in by_pair]))
        lines.append(line | {"worst_head": round(min(r["worst_head"] for r in mine), 4)})
    return lines


def printed(lines: Sequence[dict]) -> str:
    text_lines = [f"{'kind':12} {'density':>7} {'source':8} {'coverage':>24} {'output error':>24} {'worst head':>10}"]
    for line in lines:
        cells = [f"{line[n][0]:.4f} [{line[n][1]:.4f}, {line[n][2]:.4f}]" for n in ("coverage", "output_error")]
        text_lines.append(
            f"{line['kind']:12} {line['density']:>7.2f} {line['source']:8} {cells[0]:>24} {cells[1]:>24} "
            f"{line['worst_head']:>10.4f}"
        )
    return "\n".join(text_lines)


def add_parser(subparsers) -> argparse.ArgumentParser:
    """The `connectivity` command below `bench`."""
    parser = subparsers.add_parser("connectivity", help="whose attention mask fits a target best")
    add_pair_options(parser, pairs=8, grid="large", split="calibrate")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=["one-word", "seed-only", "new-scene"])
    parser.add_argument("--density", type=float, nargs="+", default=[0.3, 0.15])
    parser.set_defaults(run=command)
    return parser


def command(options: argparse.Namespace) -> int:
    """Returns the exit code; ValueError for a bad number."""
    check(options)
    if options.steps < 8:
        raise ValueError("--steps must be at least 8")
    model, size, steps = mini.load(), GRIDS[options.grid], options.steps
    probe = probe_steps(steps) - 1
    wanted = sorted({probe, *(round(share * steps) for share in LOOKED_AT)})
    offline = average(model, size, steps, wanted)
    rows = []
    jobs = [
        (kind, i, pair) for kind in options.kind for i, pair in enumerate(pairs(options.split, kind, options.pairs))
    ]
    for kind, i, pair in tqdm(jobs, unit="pair", disable=not sys.stderr.isatty()):
        target = look(model, pair.prompt, pair.seed, size, steps, wanted, keep=True)
        donor = look(model, pair.donor_prompt, pair.donor_seed, size, steps, wanted)
        own = dict.fromkeys(wanted, target.mass[probe])
        sources = dict(zip(SOURCES, (own, donor.mass, offline, target.mass), strict=True))
        rows += [row | {"kind": kind, "pair": i} for row in compared(target, probe, sources, options.density)]
    lines = table(rows)
    told = {name: getattr(options, name) for name in ("pairs", "grid", "steps", "split")}
    print(json.dumps({**told, "steps_looked_at": wanted, "table": lines}) if options.json else printed(lines))
    return 0
