"""Quality of whole runs, as a user gets them: `bench quality` drives the pipeline itself, bank, gate and all.

python -m carnator_core bench quality --out DIR [--pairs 64] [--grid large] [--plan policy even-14 even-14-r3] [--json]

Every pair: the donor's run fills an empty bank, the target's own dense run is the truth, then the target runs once a
plan. "policy" is the plan that the gate chooses; other names (see `bench reuse`) are forced whatever the risk, "alone"
borrows nothing, and letters d, r, s, one a step, draw a plan of full, region and skipped steps. -rN behind one lets
every N-th computed step between skipped ones be full while the others compute a region, -sP makes attention sparse in
the full ones, P percent of its mass kept (always, as it is quality that is asked for), and -cP lets diffusers'
first-block cache take part, with a threshold of P percent.

DIR/rows.jsonl keeps one line a pair and plan (an interrupted run goes on there), DIR/table.json the table, and
DIR/plan.json the typical plan of each name: that of the pair with the median cost.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import FirstBlockCacheConfig
from tqdm import tqdm

from ..attention.connectivity import Connectivity
from ..attention.kernels import PORTABLE
from ..bank import Bank
from ..gate.policy import DEFAULT, POLICIES
from ..mini import few_step, sample, world
from ..mini.evaluate import GRIDS
from ..pipelines import Generator
from ..reuse.engine import REFRESH
from ..reuse.plan import Plan, dense_plan, drawn_plan
from .bench import PEAK, claim, plan_named, read_clip, share_right
from .metrics import interval, psnr_each, rounded
from .options import add_case_options, add_pair_options, check, load_model
from .traces import Pair, pairs

POLICY, ALONE = "policy", "alone"
DENSE = "dense"


NAME = re.compile(r"(alone|policy|[drs]+|(?:paced|even|resume)-\d+)(?:-r(\d+))?(?:-s(\d+))?(?:-c(\d+))?")


@dataclass(frozen=True)
class Way:
    """How to run: a plan (None: the gate's own), the attention mass to keep (None: dense attention), and the threshold
    of a first-block cache (None: without one)."""

    plan: Plan | None
    kept: float | None
    refresh: int = REFRESH
    cache: float | None = None

    @classmethod
    def named(cls, name: str, steps: int) -> Way:
        """ValueError for an unknown name."""
        found = NAME.fullmatch(name)
        if found is None:
            known = "alone, policy, even-N, paced-R, resume-K or a letter d, r, s for each step"
            raise ValueError(f"{name!r} is no plan; use {known}, with -rN, -sP, -cP")
        base, refresh, kept, cache = found.groups()
        threshold = int(cache) / 100 if cache else None
        if cache and (refresh or kept):
            raise ValueError(f"{name!r}: regions and sparse attention stand down beside a first-block cache")
        share = int(kept) / 100 if kept else None
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"{name!r}: behind -s stand 1 to 100 percent")
        if refresh == "0":
            raise ValueError(f"{name!r}: every how many computed steps is one full? at least 1")
        levels = sample.sigmas(steps)[:-1].tolist()
        if base == POLICY:
            return cls(None, share, int(refresh or REFRESH), threshold)
        if base == ALONE:
            return cls(dense_plan(levels), share, cache=threshold)
        if not set(base) - set("drs"):
            return cls(drawn_plan(levels, base), share, cache=threshold)
        return cls(plan_named(base, steps).regional(int(refresh or 1)), share, cache=threshold)

    @contextmanager
    def cached(self, model: torch.nn.Module) -> Iterator[None]:
        """The model with the first-block cache, where this way has one."""
        if self.cache is None:
            yield
            return
        model.enable_cache(FirstBlockCacheConfig(threshold=self.cache))
        try:
            yield
        finally:
            model.disable_cache()

    def sparse(self) -> Connectivity | None:
        return None if self.kept is None else Connectivity(self.kept, PORTABLE)


def measure_pair(make: Generator, pair: Pair, size: int, steps: int, ways: dict[str, Way]) -> list[dict]:
    """One row for the dense run and one a plan."""
    for info in make.bank.ls():
        make.bank.remove(info.id)
    donor = make(pair.donor_prompt, pair.donor_seed, size, steps).report.written
    truth = sample.sample(make.model, [pair.prompt], [pair.seed], size, steps, make.guidance)
    told = {"seed": pair.seed, "kind": pair.kind, "changed": pair.changed}
    rows = [told | {"plan": DENSE, "cost": steps} | read_clip(truth, pair.target)]
    for name, way in ways.items():
        how = dict(donor=donor if way.plan else None, forced=way.plan, sparse=way.sparse(), refresh=way.refresh)
        with way.cached(make.model):
            clip = make(pair.prompt, pair.seed, size, steps, **how)
        report = clip.report
        if report.written:
            make.bank.remove(report.written)
        rows.append(
            told
            | {"plan": name, "decision": ALONE if name.startswith(ALONE) else report.decision}
            | {"risk": report.risk, "cost": report.forwards}
            | {"answer_error": report.answer_error}
            | {"psnr": psnr_each(clip.latent, truth, PEAK)[0]}
            | {"scope": [report.scope.evidence, report.scope.active, report.scope.density]}
            | {"steps": [[row.sigma, row.kind, row.cost] for row in report.steps]}
            | read_clip(clip.latent, pair.target)
        )
    return rows


def run(make: Generator, wanted: Sequence[Pair], size: int, steps: int, ways: dict[str, Way], kept: Path) -> list[dict]:
    """Rows of all pairs; `kept` is a file of rows from before, extended as they come."""
    found = [json.loads(line) for line in kept.read_text().splitlines()] if kept.is_file() else []
    rows = {(row["seed"], row["plan"]): row for row in found}
    left = [pair for pair in wanted if any((pair.seed, name) not in rows for name in (DENSE, *ways))]
    done = len(wanted) - len(left)
    for pair in tqdm(left, total=len(wanted), initial=done, unit="pair", disable=not sys.stderr.isatty()):
        fresh = measure_pair(make, pair, size, steps, ways)
        rows |= {(row["seed"], row["plan"]): row for row in fresh}
        with kept.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in fresh)
    return [rows[pair.seed, name] for pair in wanted for name in (DENSE, *ways)]


def line_of(name: str, mine: Sequence[dict], dense: dict[int, dict], steps: int) -> dict:
    """One plan's line: paired faithfulness less dense, its worst attribute, PSNR, and what the runs cost."""
    hits = [row for row in mine if row.get("decision", "joint") in ("joint", "exact", ALONE)]
    line = {
        "plan": name,
        "pairs": len(mine),
        "hits": len(hits),
        "cost": round(sum(row["cost"] for row in mine) / len(mine), 2),
        "hit_cost": round(sum(row["cost"] for row in hits) / len(hits), 2) if hits else None,
        "steps": steps,
        "faithfulness": rounded(interval([share_right(row) for row in mine])),
        "best_guess": round(sum(row["guess"] for row in mine) / len(mine), 4),
        "unreadable": round(1 - sum(row["readable"] for row in mine) / len(mine), 4),
    }
    if name == DENSE or not hits:
        return line
    less = [share_right(row) - share_right(dense[row["seed"]]) for row in hits]
    by_attribute = {
        word: sum(row["right"][word] - dense[row["seed"]]["right"][word] for row in hits) / len(hits)
        for word in world.ATTRIBUTES
    }
    worst = min(by_attribute, key=by_attribute.get)
    return line | {
        "hits_less_dense": rounded(interval(less)),
        "worst_attribute": [worst, round(by_attribute[worst], 4)],
        "psnr": rounded(interval([row["psnr"] for row in hits]), 2),
        "answer_error": _mean([row.get("answer_error") for row in hits]),
        "active": _mean([row["scope"][1] for row in hits]),
        "density": _mean([row["scope"][2] for row in hits]),
        "with_region": sum(row["scope"][1] is not None for row in hits),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return round(sum(known) / len(known), 4) if known else None


def typical(mine: Sequence[dict], dense: dict[int, dict], kept: float | None) -> dict | None:
    """The plan of the hit with the median cost, a row a step, and the quality that hits under it came to."""
    hits = sorted((row for row in mine if row.get("decision") == "joint"), key=lambda row: row["cost"])
    if not hits:
        return None
    row = hits[len(hits) // 2]
    shares = dict(zip(("evidence", "active", "density"), row["scope"], strict=True))
    steps = [{"sigma": s, "kind": kind, "cost": round(cost, 4)} for s, kind, cost in row["steps"]]
    quality = {
        "hits": len(hits),
        "faithfulness": round(sum(map(share_right, hits)) / len(hits), 4),
        "faithfulness_dense": round(sum(share_right(dense[hit["seed"]]) for hit in hits) / len(hits), 4),
        "psnr": round(sum(hit["psnr"] for hit in hits) / len(hits), 2),
    }
    return {"steps": steps, **shares, "kept": kept, "seed": row["seed"], "quality": quality}


def printed(lines: Sequence[dict]) -> str:
    text = [f"{'plan':12} {'hits':>9} {'cost':>6} {'faithful':>8} {'less dense':>24} {'psnr dB':>8} {'region':>7}"]
    for line in lines:
        less = line.get("hits_less_dense")
        cells = f"{less[0]:+.4f} [{less[1]:+.4f}, {less[2]:+.4f}]" if less else ""
        region = f"{line['active']:.2f}" if line.get("active") else ""
        close = f"{line['psnr'][0]:.2f}" if "psnr" in line else ""
        cost = line["hit_cost"] if line["hit_cost"] is not None else line["cost"]
        text.append(
            f"{line['plan']:12} {line['hits']:>3} of {line['pairs']:<3} {cost:>5.1f} {line['faithfulness'][0]:>8.3f} "
            f"{cells:>24} {close:>8} {region:>7}"
        )
    return "\n".join(text)


def add_parser(subparsers) -> argparse.ArgumentParser:
    """The `quality` command below `bench`."""
    parser = subparsers.add_parser("quality", help="whole runs against their own dense clips")
    parser.add_argument("--out", type=Path, required=True, help="folder for rows, table and plan")
    add_pair_options(parser, pairs=64, grid="large")
    add_case_options(parser)
    parser.add_argument("--plan", nargs="+", default=[POLICY], help="alone, policy, even-N, ...; -rN, -sP, -cP")
    parser.add_argument("--policy", choices=POLICIES, default=DEFAULT)
    few = f"the few-step companion, in so many steps (default: {few_step.STEPS})"
    parser.add_argument("--few-step", nargs="?", type=int, const=few_step.STEPS, metavar="STEPS", help=few)
    parser.set_defaults(run=command)
    return parser


@torch.no_grad()
def command(options: argparse.Namespace) -> int:
    """Returns the exit code; ValueError for a bad plan."""
    check(options)
    if options.few_step:
        options.steps = options.few_step
    ways = {name: Way.named(name, options.steps) for name in options.plan}
    asked = ("kind", "grid", "steps", "policy", "split", "seed", "dtype", "few_step")
    claim(options, asked)
    wanted = pairs(options.split, options.kind, options.pairs, options.seed)
    with tempfile.TemporaryDirectory() as folder, Bank(folder) as bank:
        model, guidance = load_model(options), few_step.GUIDANCE if options.few_step else None
        make = Generator(bank, options.policy, guidance=guidance, model=model)
        rows = run(make, wanted, GRIDS[options.grid], options.steps, ways, options.out / "rows.jsonl")
    dense = {row["seed"]: row for row in rows if row["plan"] == DENSE}
    groups = {name: [row for row in rows if row["plan"] == name] for name in (DENSE, *ways)}
    lines = [line_of(name, mine, dense, options.steps) for name, mine in groups.items()]
    told = {name: getattr(options, name) for name in ("pairs", *asked)}
    result = {**told, "table": lines}
    (options.out / "table.json").write_text(json.dumps(result, indent=1))
    found = {name: typical(groups[name], dense, way.kept) for name, way in ways.items()}
    (options.out / "plan.json").write_text(json.dumps({**told, "plans": found}, indent=1))
    print(json.dumps(result) if options.json else printed(lines))
    return 0
