"""Plain sampling of the embedded model: Euler on the flow, classifier-free guidance; no reuse of any kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import codec, text
from .model import SHIFT

GUIDANCE = 2.0  # more makes objects bolder and their outlines worse: the judge's fit error is half as large again at 4


def sigmas(steps: int, shift: float = SHIFT) -> torch.Tensor:
    """Descending noise levels (steps + 1,), from 1 to 0."""
    u = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return (shift * u / (1 + (shift - 1) * u)).float()


def noise(seeds: Sequence[int], size: int, frames: int = 5) -> torch.Tensor:
    """Initial noise (B, 16, T, size/2, size/2); row i depends on seeds[i] only."""
    return torch.cat([noise_of(s, (frames, size // codec.BLOCK, size // codec.BLOCK)) for s in seeds])


def noise_of(seed: int, latent: tuple[int, int, int]) -> torch.Tensor:
    """Initial noise (1, 16, T, h, w) for latent sides (T, h, w)."""
    return torch.randn((1, codec.CHANNELS, *latent), generator=torch.Generator().manual_seed(seed))


def guided_x0(
    model,
    x: torch.Tensor,
    sigma: float,
    cond: torch.Tensor,
    uncond: torch.Tensor,
    guidance: float,
    on_branches: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """The model's guided prediction of the clean latent at noise level sigma, (B, 16, T, h, w).

    `on_branches(cond, uncond)` sees both predictions of the velocity; never called at guidance 1.
    """
    timestep = torch.full((len(x),), 1000.0 * sigma, device=x.device)
    if guidance == 1:
        v = model(x, timestep, cond, return_dict=False)[0]
    else:
        both = model(x.repeat(2, 1, 1, 1, 1), timestep.repeat(2), torch.cat((cond, uncond)), return_dict=False)[0]
        v_cond, v_uncond = both.chunk(2)
        if on_branches:
            on_branches(v_cond, v_uncond)
        v = v_uncond + guidance * (v_cond - v_uncond)
    return x - sigma * v


@torch.no_grad()
def sample(
    model,
    prompts: Sequence[str],
    seeds: Sequence[int],
    size: int = 32,
    steps: int = 50,
    guidance: float = GUIDANCE,
    on_step: Callable[[int, float, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Latents (B, 16, 5, size/2, size/2) of the prompts; `on_step(index, sigma, x0)` sees every prediction."""
    cond, uncond = text.encode(list(prompts)), text.encode([""] * len(prompts))
    x = noise(seeds, size)
    levels = sigmas(steps).tolist()
    for i, (sigma, following) in enumerate(zip(levels[:-1], levels[1:], strict=True)):
        x0 = guided_x0(model, x, sigma, cond, uncond, guidance)
        if on_step:
            on_step(i, sigma, x0)
        x = x0 + (following / sigma) * (x - x0)
    return x
