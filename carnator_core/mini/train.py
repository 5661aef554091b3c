"""Train the embedded model: one command, seeded, resumable.

    python -m carnator_core.mini.train --out runs/mini [--resume] [--device cuda]

Flow matching on rendered clips. The first part trains on the small grid only; from `--large-from` (a share of all
steps) every other step takes the large grid. The rate is constant, then falls over the last `--decay` share. The
exponential moving average is what gets evaluated and shipped. Interrupted runs continue from the last checkpoint
bit-exactly in data (every step draws from its own seed).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from . import codec, coupling, sheet, text, world
from . import model as mini
from .muon import Muon
from .seeds import FIT

EMA_DECAY = 0.999
DROP_CAPTION = 0.1
OBJECT_WEIGHT = 5.0  # how much more the objects and their outlines count, where little noise is left


@dataclass
class Settings:
    steps: int
    batch: int
    rate: float
    large_from: float
    decay: float
    seed: int


def object_weights(cover: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Weights (B, 1, T, h, w) of mean 1 for the loss.

    `cover` (B, T, H, W) is the objects' coverage, `sigma` (B,) the noise levels. Objects are a tenth of a frame and
    texture is the rest. The weight fades with the noise, as it would pull a prediction towards objects where their
    place is still open.
    """
    near = F.max_pool2d(cover, 2 * codec.BLOCK + 1, codec.BLOCK, codec.BLOCK).sign()[:, None]
    weights = 1 + OBJECT_WEIGHT * (1 - sigma.view(-1, 1, 1, 1, 1)) * near
    return weights / weights.mean()


def batch_at(
    step: int, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(clean latents, noise, sigma (B,), embeddings, weights) of one step; depends on the step and the seed only."""
    large = step >= settings.large_from * settings.steps and step % 2 == 1
    size, count = (64, max(1, settings.batch // 4)) if large else (32, settings.batch)
    seed = FIT.start + (settings.seed * 7919 + step * 64) % (FIT.stop - 64)
    rng = random.Random(seed)
    scenes = [world.random_scene(rng, "fit") for _ in range(count)]
    prompts = [
        "" if rng.random() < DROP_CAPTION else world.caption(s, rng.randrange(len(world.PHRASINGS))) for s in scenes
    ]
    generator = torch.Generator().manual_seed(seed)
    side = size // codec.BLOCK
    noise = torch.randn((count, codec.CHANNELS, world.FRAMES, side, side), generator=generator)
    phases = [coupling.phase_of(n, s.camera) for n, s in zip(noise, scenes, strict=True)]
    clips, cover = world.render_with_cover(scenes, seed, size, phases)
    clean = codec.encode(clips)
    u = torch.rand(count, generator=generator)  # evenly as a sampler steps for half of the clips,
    u[: count // 2] = torch.sigmoid(torch.randn(count // 2, generator=generator))  # mostly midway for the others
    sigma = mini.SHIFT * u / (1 + (mini.SHIFT - 1) * u)
    return clean, noise, sigma, text.encode(prompts), object_weights(cover, sigma)


def rate_at(step: int, settings: Settings) -> float:
    """Learning rate: 100 steps of warm-up, constant, linear fall to 2 % at the end."""
    left = (settings.steps - step) / max(1.0, settings.decay * settings.steps)
    return settings.rate * min(1.0, (step + 1) / 100, max(0.02, left))


def fast_dtype(device: str) -> torch.dtype:
    """bfloat16 where the device multiplies it in hardware (AMX on CPUs, any recent GPU), float32 elsewhere."""
    fast = torch.cpu._is_amx_tile_supported() if device == "cpu" else True
    return torch.bfloat16 if fast else torch.float32


def optimisers(model: torch.nn.Module, rate: float, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    """Muon on the matrices of the blocks, AdamW on everything else."""
    matrices = [p for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        Muon(matrices, lr=rate, weight_decay=0.01, dtype=dtype),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def descend(
    optimisers: Sequence[torch.optim.Optimizer], parameters: Sequence[torch.Tensor], loss: torch.Tensor, rate: float
) -> None:
    """One step down the loss, gradients clipped to unit norm."""
    for optimiser in optimisers:
        optimiser.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.step()


def below(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def write_checkpoint(
    path: Path,
    tensors: dict[str, torch.Tensor],
    optimisers: Sequence[torch.optim.Optimizer],
    step: int,
    seconds: float,
) -> None:
    """One safetensors file with tensors and optimiser states, replaced at once."""
    tensors = dict(tensors)
    for i, optimiser in enumerate(optimisers):
        for place, state in optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{i}.{place}.{name}": value for name, value in state.items()}
    temporary = path.with_suffix(".tmp")
    metadata = {"step": str(step), "seconds": str(seconds)}
    save_file({k: v.detach().contiguous() for k, v in tensors.items()}, temporary, metadata=metadata)
    temporary.replace(path)


def read_checkpoint(
    path: Path, optimisers: Sequence[torch.optim.Optimizer], device: str
) -> tuple[dict[str, torch.Tensor], int, float]:
    """(tensors, step, seconds) of a checkpoint; sets the optimisers' states. FileNotFoundError when there is none."""
    with safe_open(path, framework="pt", device=str(device)) as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    for i, optimiser in enumerate(optimisers):
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in below(f"optimiser.{i}.", tensors).items():
            place, _, name = key.partition(".")
            state.setdefault(int(place), {})[name] = value
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    return tensors, int(metadata["step"]), float(metadata["seconds"])


class Run(Protocol):
    """What `run` drives: anything that trains in steps, saves itself and shows what it can do."""

    settings: Settings
    out: Path
    step: int
    seconds: float

    def train_step(self) -> float: ...

    def save(self) -> None: ...

    def write_sheet(self) -> None: ...


class Trainer:
    def __init__(self, settings: Settings, out: Path, device: str, compiled: bool):
        self.settings, self.out, self.device = settings, out, device
        self.dtype = fast_dtype(device)
        torch.manual_seed(settings.seed)
        self.model = mini.build().to(device)
        self.forward = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.average = mini.build().to(device).requires_grad_(False)
        self.average.load_state_dict(self.model.state_dict())
        self.optimisers = optimisers(self.model, settings.rate, self.dtype)
        self.step = 0
        self.seconds = 0.0

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.safetensors"

    def save(self) -> None:
        """Write the checkpoint (one file, replaced at once) and the averaged weights as they are shipped."""
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"average.{k}": v for k, v in self.average.state_dict().items()}
        write_checkpoint(self.checkpoint, tensors, self.optimisers, self.step, self.seconds)
        mini.save(
            self.average,
            self.out / "weights.safetensors",
            {"step": str(self.step), "seed": str(self.settings.seed)},
        )

    def resume(self) -> None:
        """Continue from the checkpoint. FileNotFoundError when there is none."""
        tensors, self.step, self.seconds = read_checkpoint(self.checkpoint, self.optimisers, self.device)
        self.model.load_state_dict(below("model.", tensors))
        self.average.load_state_dict(below("average.", tensors))

    def start_from(self, weights: Path) -> None:
        """Begin with trained weights and fresh optimiser state."""
        trained = mini.load(weights).state_dict()
        self.model.load_state_dict(trained)
        self.average.load_state_dict(trained)

    def train_step(self) -> float:
        clean, noise, sigma, embeddings, weights = (t.to(self.device) for t in batch_at(self.step, self.settings))
        level = sigma.view(-1, 1, 1, 1, 1)
        noisy = (1 - level) * clean + level * noise
        with torch.autocast(torch.device(self.device).type, self.dtype, enabled=self.dtype != torch.float32):
            prediction = self.forward(noisy, sigma * 1000, embeddings, return_dict=False)[0]
        loss = ((prediction.float() - (noise - clean)).pow(2) * weights).mean()
        descend(self.optimisers, list(self.model.parameters()), loss, rate_at(self.step, self.settings))
        decay = min(EMA_DECAY, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - decay)
        self.step += 1
        return loss.item()

    def write_sheet(self) -> None:
        size = 64 if self.step > self.settings.large_from * self.settings.steps else 32
        path = self.out / f"sheet_{size}_{self.step:06d}.png"
        sheet.of_model(self.average.cpu().eval(), path, size, steps=20)
        self.average.to(self.device)


def run(trainer: Run, save_every: int, sheet_every: int) -> None:
    total = trainer.settings.steps
    bar = tqdm(total=total, initial=trainer.step, unit="step", smoothing=0.02)
    log = (trainer.out / "log.jsonl").open("a")
    losses: list[float] = []
    while trainer.step < total:
        started = time.perf_counter()
        losses.append(trainer.train_step())
        trainer.seconds += time.perf_counter() - started
        bar.update()
        if trainer.step % 50 == 0 or trainer.step == total:
            row = {"step": trainer.step, "loss": round(sum(losses) / len(losses), 5), "seconds": round(trainer.seconds)}
            log.write(json.dumps(row) + "\n")
            log.flush()
            bar.set_postfix(loss=row["loss"])
            losses.clear()
        if trainer.step % save_every == 0 or trainer.step == total:
            trainer.save()
        if trainer.step % sheet_every == 0 or trainer.step == total:
            trainer.write_sheet()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="carnator_core.mini.train", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/mini"), help="checkpoints, log and sample sheets")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument("--init", type=Path, help="start from these weights with fresh optimiser state")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=32, help="clips a step on the small grid; a quarter on the large")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument(
        "--large-from", type=float, default=0.5, help="share of the steps after which the large grid joins"
    )
    parser.add_argument("--decay", type=float, default=0.3, help="share of the steps over which the rate falls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile: two minutes at the start, then 15 %% faster"
    )
    parser.add_argument("--save-every", type=int, default=250)
    parser.add_argument("--sheet-every", type=int, default=1000)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(options.steps, options.batch, options.rate, options.large_from, options.decay, options.seed)
    trainer = Trainer(settings, options.out, options.device, options.compile)
    if options.resume:
        trainer.resume()
    elif options.init:
        trainer.start_from(options.init)
    run(trainer, options.save_every, options.sheet_every)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
