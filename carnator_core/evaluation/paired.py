"""One-word pairs with the same noise: every method answers the same plan, measured against the target's own dense run.

python -m carnator_core.evaluation.paired --pairs 12 [--grid small|large] [--steps 50] [--split fit] [--json]

Controls stand at equal forwards: fewer steps, the target's own prediction frozen or forecast, and a start from the
donor's noisy latent (NIRVANA).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from typing import Protocol

import torch
from tqdm import tqdm

from ..grid import TokenGrid
from ..mini import codec, sample, text, world
from ..mini import model as mini
from ..mini.evaluate import GRIDS, psnr
from ..mini.judge import faithfulness, judge
from ..mini.seeds import RANGES
from ..reuse.answer import DonorAnswer, ForecastAnswer, FrozenAnswer
from ..reuse.plan import Plan, dense_plan, paced_plan, resume_plan
from ..reuse.trajectory import Trajectory


class Answerer(Protocol):
    def observe(self, sigma: float, x0: torch.Tensor) -> None: ...
    def answer(self, sigma: float) -> torch.Tensor: ...


class Prompted:
    """The embedded model with one prompt's conditioning bound: guided x0 of (1, 16, T, h, w) latents."""

    def __init__(self, model, prompt: str, guidance: float = sample.GUIDANCE):
        self.model, self.guidance = model, guidance
        self.cond, self.uncond = text.encode([prompt]), text.encode([""])

    @torch.no_grad()
    def x0(self, x: torch.Tensor, sigma: float) -> torch.Tensor:
        return sample.guided_x0(self.model, x, sigma, self.cond, self.uncond, self.guidance)


def walk(
    prompted: Prompted,
    x: torch.Tensor,
    plan: Plan,
    answerer: Answerer,
    on_step: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
    start: int = 0,
) -> torch.Tensor:
    """Euler along the plan from step `start`; `on_step(index, noisy latent, x0)` sees every step."""
    levels = [*plan.sigmas, 0.0]
    for i in range(start, len(plan.sigmas)):
        if plan.kind(i) == "skipped":
            x0 = answerer.answer(levels[i])
        else:
            x0 = prompted.x0(x, levels[i])
            answerer.observe(levels[i], x0)
        if on_step:
            on_step(i, x, x0)
        x = x0 + (levels[i + 1] / levels[i]) * (x - x0)
    return x


def compare(
    model, target: world.Scene, donor: world.Scene, seed: int, size: int, plan: Plan
) -> dict[str, torch.Tensor]:
    """Final latents by method for one pair. All but "dense" spend the same number of forwards."""
    noise = sample.noise([seed], size)
    grid = TokenGrid.of_latent(noise.shape)
    wanted, lender = Prompted(model, world.caption(target)), Prompted(model, world.caption(donor))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    whole = dense_plan(plan.sigmas)
    walk(lender, noise, whole, FrozenAnswer(), lambda i, x, x0: seen.append((x, x0)))
    trajectory = Trajectory(plan.sigmas, torch.stack([x0 for _, x0 in seen]))
    resume = len(plan.sigmas) - plan.forwards
    fewer = tuple(sample.sigmas(plan.forwards)[:-1].tolist())
    return {
        "dense": walk(wanted, noise, whole, FrozenAnswer()),
        "fewer-steps": walk(wanted, noise, dense_plan(fewer), FrozenAnswer()),
        "own-frozen": walk(wanted, noise, plan, FrozenAnswer()),
        "own-forecast": walk(wanted, noise, plan, ForecastAnswer()),
        "own-forecast-half": walk(wanted, noise, plan, ForecastAnswer(0.5)),
        "nirvana": walk(wanted, seen[resume][0], whole, FrozenAnswer(), start=resume),
        "carnator": walk(wanted, noise, plan, DonorAnswer(trajectory, grid)),
    }


def plan_named(name: str, steps: int) -> Plan:
    """resume-K: skip from the probe to step K. paced-R: R skipped for each dense step, dense finish."""
    kind, _, number = name.partition("-")
    levels = sample.sigmas(steps)[:-1].tolist()
    if kind == "resume" and number.isdigit():
        return resume_plan(levels, int(number))
    if kind == "paced" and number.isdigit():
        return paced_plan(levels, int(number))
    raise ValueError(f"plan {name!r} is unknown; use resume-K or paced-R")


def measure(model, pairs: int, size: int, plan: Plan, split: str, seed: int) -> dict[str, dict[str, float]]:
    """Mean faithfulness and PSNR (latent, to the target's dense result) by method."""
    rng = random.Random(seed)
    found: dict[str, list[tuple[float, float]]] = {}
    for i in tqdm(range(pairs), disable=not sys.stderr.isatty()):
        target = world.random_scene(rng, split)
        _, donor = world.one_word_neighbour(target, rng)
        results = compare(model, target, donor, RANGES[split].start + 500_000 + seed * 1000 + i, size, plan)
        for name, latent in results.items():
            right = faithfulness(judge(codec.decode(latent)[0]), target)
            close = psnr(latent - results["dense"], 2 * codec.SCALE)
            found.setdefault(name, []).append((sum(right.values()) / len(right), close))
    return {
        name: {
            "faithfulness": round(sum(f for f, _ in rows) / pairs, 4),
            "psnr": round(sum(p for _, p in rows) / pairs, 2),
        }
        for name, rows in found.items()
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="carnator_core.evaluation.paired", description=__doc__.split("\n\n")[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--grid", choices=GRIDS, default="small")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--plan", default="paced-3", help="resume-K or paced-R")
    parser.add_argument("--split", choices=RANGES, default="fit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    try:
        plan = plan_named(options.plan, options.steps)
    except ValueError as error:
        parser.error(str(error))
    rows = measure(mini.load(), options.pairs, GRIDS[options.grid], plan, options.split, options.seed)
    result = {
        "plan": str(plan),
        "forwards": plan.forwards,
        "steps": options.steps,
        "pairs": options.pairs,
        "methods": rows,
    }
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{plan}  {plan.forwards} of {options.steps} steps computed, {options.pairs} pairs, {options.split} split"
        )
        for name, row in rows.items():
            print(f"{name:18} faithfulness {row['faithfulness']:.3f}   psnr {row['psnr']:6.2f} dB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
