"""The harness: `bench reuse` compares methods at equal forwards on pairs of requests, with paired intervals.

python -m carnator_core bench reuse --pairs 200 [--grid small|large] [--plan paced-2 paced-3] [--kind one-word]
    [--split proof] [--methods ...] [--out DIR] [--json] [--plot FILE]

Every pair is measured once a plan and kept as a line of DIR/rows.jsonl; an interrupted run goes on where it stopped.
Faithfulness is the judge's, distances are to the target's own dense result. Differences are paired: method less dense
in faithfulness, carnator less method in PSNR.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from ..mini import codec, sample, world
from ..mini.evaluate import GRIDS, guesses
from ..mini.judge import Measures, measure, verdict_on
from ..reuse.plan import Plan, even_plan, paced_plan, resume_plan
from .methods import ABLATIONS, METHODS, Case
from .metrics import interval, psnr_each, rounded
from .options import add_case_options, add_pair_options, check, load_model
from .traces import Pair, pairs

BATCH = {32: 16, 64: 4}
PEAK = 2 * codec.SCALE


def plan_named(name: str, steps: int) -> Plan:
    """paced-R: R skipped for each dense step. even-N: N dense steps between probe and finish, evenly in log SNR.
    resume-K: skip from the probe to step K."""
    kind, _, number = name.partition("-")
    levels = sample.sigmas(steps)[:-1].tolist()
    if kind == "resume" and number.isdigit() and int(number) < steps:
        return resume_plan(levels, int(number))
    if kind == "paced" and number.isdigit():
        return paced_plan(levels, int(number))
    if kind == "even" and number.isdigit():
        return even_plan(levels, int(number))
    raise ValueError(
        f"plan {name!r} is unknown for {steps} steps; use even-N, paced-R, or resume-K with K below the steps"
    )


def claim(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Make the folder `options.out` this run's; ValueError when it holds rows of other settings or weights."""
    told = {name: getattr(options, name) for name in names}
    told["weights"] = hashlib.blake2b(options.weights.read_bytes(), digest_size=8).hexdigest()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "settings.json"
    if path.is_file() and json.loads(path.read_text()) != told:
        raise ValueError(f"{options.out} holds rows of other settings ({path}); choose another folder")
    path.write_text(json.dumps(told))


def read_clip(latent: torch.Tensor, scene: world.Scene) -> dict:
    """What the judge finds in one decoded latent (1, 16, T, h, w): right attributes, best guess, readable."""
    clip = codec.decode(latent)[0]
    found = measure(clip) if clip.isfinite().all() else Measures(dict.fromkeys(world.ATTRIBUTES))
    read = verdict_on(found).attributes
    return {
        "right": {name: read[name] == getattr(scene, name) for name in world.ATTRIBUTES},
        "guess": guesses([found], [scene]),
        "readable": None not in read.values(),
    }


def measure_batch(model, part: Sequence[Pair], size: int, plans: dict[str, Plan], methods: Iterable[str]) -> list[dict]:
    """One row a pair, plan and method."""
    case = Case.of(model, part, size, next(iter(plans.values())))
    truth, agrees = case.truth()
    rows = []
    for plan_name, plan in plans.items():
        for name in methods:
            if name == "dense" and plan_name != next(iter(plans)):
                continue
            found = truth if name == "dense" else (METHODS | ABLATIONS)[name](case.with_plan(plan))
            for i, (pair, close) in enumerate(zip(part, psnr_each(found, truth, PEAK), strict=True)):
                row = {"seed": pair.seed, "changed": pair.changed, "plan": plan_name, "method": name, "psnr": close}
                row["agreement"] = round(float(agrees[i]), 4)
                rows.append(row | read_clip(found[i : i + 1], pair.target))
    return rows


def run(
    model, wanted: Sequence[Pair], size: int, plans: dict[str, Plan], methods: Sequence[str], kept: Path | None
) -> list[dict]:
    """Rows of all pairs; `kept` is a file of rows from before, extended as they come."""
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept and kept.is_file() else []
    done = {row["seed"] for row in rows}
    left = [pair for pair in wanted if pair.seed not in done]
    with tqdm(total=len(wanted), initial=len(wanted) - len(left), unit="pair", disable=not sys.stderr.isatty()) as bar:
        for i in range(0, len(left), BATCH[size]):
            part = left[i : i + BATCH[size]]
            fresh = measure_batch(model, part, size, plans, methods)
            rows.extend(fresh)
            if kept:
                with kept.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in fresh)
            bar.update(len(part))
    return [row for row in rows if row["seed"] in {pair.seed for pair in wanted}]


def _by_pair(rows: Sequence[dict], plan: str, method: str) -> dict[int, dict]:
    return {row["seed"]: row for row in rows if row["method"] == method and (method == "dense" or row["plan"] == plan)}


def share_right(row: dict) -> float:
    """Share of attributes that one row was read right in."""
    return sum(row["right"].values()) / len(row["right"])


def table(rows: Sequence[dict], plans: dict[str, Plan], methods: Sequence[str]) -> list[dict]:
    """One line a plan and method: means with 95 % intervals, and paired differences."""
    out = []
    for plan_name, plan in plans.items():
        dense, ours = _by_pair(rows, plan_name, "dense"), _by_pair(rows, plan_name, "carnator")
        for name in methods:
            mine = _by_pair(rows, plan_name, name)
            seeds = sorted(mine)
            line = {
                "plan": plan_name,
                "method": name,
                "pairs": len(seeds),
                "steps": len(plan.sigmas),
                "forwards": len(plan.sigmas) if name == "dense" else plan.forwards,
                "faithfulness": rounded(interval([share_right(mine[s]) for s in seeds])),
                "best_guess": round(sum(mine[s]["guess"] for s in seeds) / len(seeds), 4),
                "unreadable": round(1 - sum(mine[s]["readable"] for s in seeds) / len(seeds), 4),
                "psnr": rounded(interval([mine[s]["psnr"] for s in seeds]), 2),
            }
            if dense and name != "dense":
                line["less_dense"] = rounded(interval([share_right(mine[s]) - share_right(dense[s]) for s in seeds]))
            if ours and name not in ("dense", "carnator"):
                line["carnator_gains_db"] = rounded(interval([ours[s]["psnr"] - mine[s]["psnr"] for s in seeds]), 2)
            out.append(line)
    return out


def printed(lines: Sequence[dict]) -> str:
    head = (
        f"{'plan':10} {'method':13} {'forwards':>9} {'faithfulness':>22} {'less dense':>10} {'psnr dB':>8} {'gain':>6}"
    )
    text = [head]
    for line in lines:
        mean, low, high = line["faithfulness"]
        less = f"{line['less_dense'][0]:+.4f}" if "less_dense" in line else ""
        gain = f"{line['carnator_gains_db'][0]:+.2f}" if "carnator_gains_db" in line else ""
        text.append(
            f"{line['plan']:10} {line['method']:13} {line['forwards']:>3} of {line['steps']:<2} "
            f"{mean:>7.3f} [{low:.3f}, {high:.3f}] {less:>10} {line['psnr'][0]:>8.2f} {gain:>6}"
        )
    return "\n".join(text)


def plot(lines: Sequence[dict], path: Path) -> None:
    """PSNR and faithfulness over the share of steps that are answered, one curve a method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    names = dict.fromkeys(line["method"] for line in lines)
    for name in names:
        mine = sorted((ln for ln in lines if ln["method"] == name), key=lambda ln: ln["forwards"])
        share = [100 * (1 - ln["forwards"] / ln["steps"]) for ln in mine]
        for axis, key in zip(axes, ("psnr", "faithfulness"), strict=True):
            if name == "dense":
                if key == "faithfulness":
                    axis.axhline(mine[0][key][0], color="grey", linestyle=":", label="dense")
                continue
            mean, low, high = zip(*(ln[key] for ln in mine), strict=True)
            axis.plot(share, mean, marker="o", label=name, linewidth=2.5 if name == "carnator" else 1.2)
            axis.fill_between(share, low, high, alpha=0.12)
    for axis, label in zip(axes, ("PSNR to the own dense clip, dB", "faithfulness"), strict=True):
        axis.set_xlabel("steps answered without the model, %")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def add_parser(subparsers) -> argparse.ArgumentParser:
    """The `reuse` command below `bench`."""
    parser = subparsers.add_parser("reuse", help="methods at equal forwards on pairs of requests")
    return _arguments(parser)


def _arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add_pair_options(parser, pairs=200, grid="small")
    add_case_options(parser)
    parser.add_argument("--plan", nargs="+", default=["even-14"], help="even-N, paced-R or resume-K")
    parser.add_argument("--methods", nargs="+", choices=METHODS | ABLATIONS, default=list(METHODS))
    parser.add_argument("--out", type=Path, help="folder for rows.jsonl (resumed when it exists) and table.json")
    parser.add_argument("--plot", type=Path, help="write a picture of the curves")
    parser.set_defaults(run=command)
    return parser


def command(options: argparse.Namespace) -> int:
    """Returns the exit code; ValueError for a bad plan."""
    plans = {name: plan_named(name, options.steps) for name in options.plan}
    check(options)
    methods = list(dict.fromkeys(["dense", *options.methods]))
    kept = None
    if options.out:
        claim(options, ("kind", "grid", "steps", "plan", "methods", "split", "seed", "dtype"))
        kept = options.out / "rows.jsonl"
    wanted = pairs(options.split, options.kind, options.pairs, options.seed)
    rows = run(load_model(options), wanted, GRIDS[options.grid], plans, methods, kept)
    lines = table(rows, plans, methods)
    told = {n: getattr(options, n) for n in ("pairs", "kind", "grid", "steps", "split", "seed", "dtype")}
    result = {**told, "plans": {name: str(plan) for name, plan in plans.items()}, "table": lines}
    if options.out:
        (options.out / "table.json").write_text(json.dumps(result, indent=1))
    if options.plot:
        plot(lines, options.plot)
    print(json.dumps(result) if options.json else printed(lines))
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = _arguments(argparse.ArgumentParser(prog="carnator_core.evaluation.bench", description=__doc__))
    options = parser.parse_args(argv)
    try:
        return command(options)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    raise SystemExit(main())
