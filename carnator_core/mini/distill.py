"""Distil the embedded model's few-step companion: one command, seeded, resumable.

    python -m carnator_core.mini.distill --out runs/few [--resume] [--teacher WEIGHTS]
    python -m carnator_core.mini.distill --out runs/few --compare 16     # after it: fidelity beside plain sampling

The teacher is the embedded model itself, guided; its flow is an ordinary differential equation, so where it leads from
a latent is a plain regression target. The student is the same model with a LoRA, unguided, at the four levels of
`sample.sigmas(4)`: at level k it learns the average velocity with which the teacher gets from x(k) to level k + 1.
Until `--own-from` (a share of the steps) x(k) is the teacher's own; from then on it is where the student's own earlier
steps led, so that it learns to mend its errors (trajectory regression as in Luhman and Luhman 2021, then states of the
learner as in DAgger, Ross et al. 2011).

Teacher forwards are the dear part, so trajectories are made in chunks and used several times. A run is the same
whether it was interrupted or not: the checkpoint holds the LoRA that made the chunk, and the chunk is made again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.func import functional_call
from tqdm import tqdm

from ..request import digest_of_weights
from . import evaluate, few_step, lora, sample, sheet, text, train, world
from . import model as mini
from .seeds import FIT

LEVELS = few_step.STEPS
LARGE_EVERY = 4  # one chunk in so many takes the large grid
FIRST_SEED = FIT.start + 500_000  # of the noises


@dataclass
class Settings(train.Settings):
    """`batch` counts clips on the small grid (a quarter on the large), `large_from` and `own_from` shares of steps."""

    rank: int
    own_from: float
    substeps: int  # of the teacher between two levels
    rollouts: int  # batches of trajectories in a chunk
    epochs: int  # how often a chunk is used

    @property
    def chunk_steps(self) -> int:
        return self.rollouts * LEVELS * self.epochs


@dataclass
class Rollouts:
    """A chunk. Row r of trajectory r % N at level r // N, with N trajectories."""

    states: torch.Tensor  # (LEVELS * N, 16, T, h, w): x(k)
    velocities: torch.Tensor  # the same shape: the teacher's average velocity from there to the next level
    embeddings: torch.Tensor  # (N, 32, 4096)


def requests_of(chunk: int, settings: Settings) -> tuple[list[str], list[int], int]:
    """(prompts, noise seeds, grid in pixels) of a chunk; depends on the chunk and the seed only."""
    large = chunk % LARGE_EVERY == LARGE_EVERY - 1 and chunk * settings.chunk_steps >= (
        settings.large_from * settings.steps
    )
    count = settings.rollouts * rows_of(settings, large)
    first = FIRST_SEED + (settings.seed * 7919 + chunk * settings.rollouts * settings.batch) % 400_000
    rng = random.Random(first)
    scenes = [world.random_scene(rng, "fit") for _ in range(count)]
    prompts = [world.caption(s, rng.randrange(len(world.PHRASINGS))) for s in scenes]
    return prompts, list(range(first, first + count)), 64 if large else 32


def rows_of(settings: Settings, large: bool) -> int:
    return max(1, settings.batch // 4) if large else settings.batch


def follow(
    model, x: torch.Tensor, levels: list[float], cond: torch.Tensor, uncond: torch.Tensor, guidance: float
) -> torch.Tensor:
    """The guided flow's latent at levels[-1], from x at levels[0].

    Adams-Bashforth of second order on uneven levels, the first step Euler: as near to 50 Euler steps with 16 as Euler
    itself with 20 or more.
    """
    before = None
    for sigma, following in zip(levels[:-1], levels[1:], strict=True):
        velocity = (x - sample.guided_x0(model, x, sigma, cond, uncond, guidance)) / sigma
        slope = velocity
        if before is not None:
            earlier, earlier_sigma = before
            slope = velocity + (following - sigma) / (2 * (sigma - earlier_sigma)) * (velocity - earlier)
        x, before = x + (following - sigma) * slope, (velocity, sigma)
    return x


class Distiller:
    def __init__(self, settings: Settings, teacher: Path, out: Path, device: str, compiled: bool):
        self.settings, self.out, self.device = settings, out, device
        self.dtype = train.fast_dtype(device)
        self.model = mini.load(teacher).to(device)
        self.forward = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.lora = lora.start(self.model, settings.rank, settings.seed)
        self.lora.metadata = {
            few_step.BASE: digest_of_weights(self.model.state_dict().items()),
            "steps": str(few_step.STEPS),
            "guidance": str(few_step.GUIDANCE),
            "seed": str(settings.seed),
        }
        self.optimisers = optimisers(self.lora, settings.rate)
        self.uncond = text.encode([""]).to(device)
        self.levels = sample.sigmas(LEVELS).tolist()
        self.made_by = self._factors()  # the LoRA with which the present chunk was made
        self.rollouts: Rollouts | None = None
        self.step = 0
        self.seconds = 0.0

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.safetensors"

    @property
    def result(self) -> Path:
        return self.out / few_step.LORA.name

    def _factors(self) -> dict[str, torch.Tensor]:
        return {name: factor.detach().clone() for name, factor in self.lora.tensors().items()}

    def save(self) -> None:
        """Write the checkpoint (one file, replaced at once) and the LoRA as it is shipped."""
        tensors = {f"lora.{k}": v for k, v in self.lora.tensors().items()}
        tensors |= {f"made_by.{k}": v for k, v in self.made_by.items()}
        train.write_checkpoint(self.checkpoint, tensors, self.optimisers, self.step, self.seconds)
        self.lora.metadata["step"] = str(self.step)
        lora.save(self.lora, self.result)

    def resume(self) -> None:
        """Continue from the checkpoint. FileNotFoundError when there is none."""
        tensors, self.step, self.seconds = train.read_checkpoint(self.checkpoint, self.optimisers, self.device)
        if self.step % self.settings.chunk_steps:
            self.lora.copy_(train.below("made_by.", tensors))
            self.refill()
        self.lora.copy_(train.below("lora.", tensors))

    def start_from(self, companion: Path) -> None:
        """Begin with the factors of another LoRA, as one of weights that these were trained from. ValueError when it
        does not fit."""
        self.lora.copy_(of_same_shape(lora.load(companion), self.lora))
        self.made_by = self._factors()

    def _autocast(self) -> torch.autocast:
        kind = torch.device(self.device).type
        return torch.autocast(kind, self.dtype, enabled=self.dtype != torch.float32)

    def student(self, x: torch.Tensor, sigma: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """The student's velocity at x; sigma (B,)."""
        weights = lora.changed_weights(self.model, self.lora)  # outside autocast: the change is small beside the weight
        with self._autocast():
            out = functional_call(self.forward, weights, (x, sigma * 1000, embeddings), {"return_dict": False})
        return out[0].float()

    @torch.no_grad()
    def refill(self) -> None:
        """Make the chunk that the present step lies in."""
        settings = self.settings
        self.made_by = self._factors()
        prompts, seeds, size = requests_of(self.step // settings.chunk_steps, settings)
        own = self.step // settings.chunk_steps * settings.chunk_steps >= settings.own_from * settings.steps
        fine = sample.sigmas(LEVELS * settings.substeps).tolist()
        embeddings = text.encode(prompts)
        noise = sample.noise(seeds, size)
        batch = len(seeds) // settings.rollouts
        states: list[list[torch.Tensor]] = [[] for _ in range(LEVELS)]
        velocities: list[list[torch.Tensor]] = [[] for _ in range(LEVELS)]
        starts = range(0, len(seeds), batch)
        for i in tqdm(starts, desc="trajectories", leave=False, disable=not sys.stderr.isatty()):
            x, cond = noise[i : i + batch].to(self.device), embeddings[i : i + batch].to(self.device)
            for k, (sigma, following) in enumerate(zip(self.levels[:-1], self.levels[1:], strict=True)):
                span = fine[k * settings.substeps : (k + 1) * settings.substeps + 1]
                with self._autocast():
                    reached = follow(self.forward, x, span, cond, self.uncond.expand_as(cond), sample.GUIDANCE)
                states[k].append(x)
                velocities[k].append((reached - x) / (following - sigma))
                if own:
                    level = torch.full((len(x),), sigma, device=x.device)
                    reached = x + (following - sigma) * self.student(x, level, cond)
                x = reached
        self.rollouts = Rollouts(torch.cat(sum(states, [])), torch.cat(sum(velocities, [])), embeddings.to(self.device))

    def rows(self) -> torch.Tensor:
        """Which rows of the chunk the present step takes: every epoch shuffles anew."""
        settings = self.settings
        place = self.step % settings.chunk_steps
        per_epoch = settings.rollouts * LEVELS
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + self.step // per_epoch)
        order = torch.randperm(len(self.rollouts.states), generator=generator).view(per_epoch, -1)
        return order[place % per_epoch].to(self.device)

    def train_step(self) -> float:
        if self.step % self.settings.chunk_steps == 0:
            self.refill()
        chunk, rows = self.rollouts, self.rows()
        count = len(chunk.embeddings)
        sigma = torch.tensor(self.levels, device=self.device)[rows // count]
        prediction = self.student(chunk.states[rows], sigma, chunk.embeddings[rows % count])
        loss = (prediction - chunk.velocities[rows]).pow(2).mean()
        train.descend(self.optimisers, self.lora.parameters(), loss, train.rate_at(self.step, self.settings))
        self.step += 1
        return loss.item()

    def write_sheet(self) -> None:
        merged = mini.build(**mini.size_of(self.model.state_dict()))
        merged.load_state_dict(self.model.state_dict())
        lora.merge(merged, self.lora)
        path = self.out / f"sheet_{self.step:06d}.png"
        sheet.of_model(merged.eval(), path, steps=few_step.STEPS, guidance=few_step.GUIDANCE)


def of_same_shape(found: lora.Lora, like: lora.Lora) -> dict[str, torch.Tensor]:
    """The factors of a LoRA, for `Lora.copy_`; ValueError where one is missing or of another rank."""
    own, wanted = found.tensors(), like.tensors()
    wrong = [name for name, factor in wanted.items() if name not in own or own[name].shape != factor.shape]
    if wrong:
        raise ValueError(f"the LoRA to start from has no {wrong[0]} of {tuple(wanted[wrong[0]].shape)}; check --rank")
    return {name: own[name] for name in wanted}


def optimisers(factors: lora.Lora, rate: float) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(factors.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)]


def compare(teacher: Path, companion: Path, count: int, grid: str, steps: int = 50, seed: int = 0) -> dict[str, float]:
    """Mean PSNR in dB of four-step clips to the teacher's guided ones of `steps` steps, same prompts and noises.

    Captions of the calibration split, which training never sees. Clips as decoded, peak 2.
    """
    requests = evaluate.draw(count, "calibrate", seed)
    base = mini.load(teacher)
    ways = {
        "student": (few_step.load(teacher, companion), few_step.GUIDANCE),
        "plain, guidance 1": (base, 1.0),
        f"plain, guidance {sample.GUIDANCE:g}": (base, sample.GUIDANCE),
    }
    size = evaluate.GRIDS[grid]
    truth = evaluate.clips(base, requests, size, steps, f"{steps} steps")
    out = {}
    for name, (model, guidance) in ways.items():
        found = evaluate.clips(model, requests, size, few_step.STEPS, name, guidance)
        out[name] = sum(evaluate.psnr(a - b, 2.0) for a, b in zip(found, truth, strict=True)) / count
    return {name: round(value, 2) for name, value in out.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="carnator_core.mini.distill", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/few"), help="checkpoint, LoRA, log and sample sheets")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument("--init", type=Path, help="start from this LoRA, with fresh optimiser state")
    parser.add_argument("--teacher", type=Path, default=mini.WEIGHTS, help="weights of the embedded model")
    parser.add_argument("--steps", type=int, default=1280)
    parser.add_argument("--batch", type=int, default=32, help="clips a step on the small grid; a quarter on the large")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--rank", type=int, default=32, help="rank inside the blocks; half of it elsewhere")
    parser.add_argument(
        "--own-from", type=float, default=0.3, help="share of the steps after which the student walks its own way"
    )
    parser.add_argument(
        "--large-from", type=float, default=0.1, help="share of the steps after which the large grid joins"
    )
    parser.add_argument("--substeps", type=int, default=4, help="teacher steps between two of the four levels")
    parser.add_argument("--rollouts", type=int, default=4, help="batches of trajectories that a chunk holds")
    parser.add_argument("--epochs", type=int, default=4, help="how often a chunk is used")
    parser.add_argument("--decay", type=float, default=0.5, help="share of the steps over which the rate falls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile: six graphs; for runs of hours only")
    parser.add_argument("--save-every", type=int, default=64)
    parser.add_argument("--sheet-every", type=int, default=640)
    parser.add_argument(
        "--compare", type=int, metavar="N", help="train nothing; fidelity of --out's LoRA on N requests"
    )
    parser.add_argument("--grid", choices=evaluate.GRIDS, default="small", help="of --compare")
    options = parser.parse_args(argv)
    if options.compare:
        companion = options.out / few_step.LORA.name
        print(json.dumps(compare(options.teacher, companion, options.compare, options.grid)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        options.steps, options.batch, options.rate, options.large_from, options.decay, options.seed,
        options.rank, options.own_from, options.substeps, options.rollouts, options.epochs,
    )  # fmt: skip
    distiller = Distiller(settings, options.teacher, options.out, options.device, options.compile)
    if options.resume:
        distiller.resume()
    elif options.init:
        distiller.start_from(options.init)
    train.run(distiller, options.save_every, options.sheet_every)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
