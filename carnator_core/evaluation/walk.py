"""Sampling along a plan with any answerer, a batch of requests at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..mini import sample, text
from ..reuse.correction import Answerer
from ..reuse.plan import Plan


class Prompted:
    """The embedded model with the conditioning of B prompts bound: guided x0 of (B, 16, T, h, w) latents."""

    def __init__(self, model, prompts: Sequence[str], guidance: float = sample.GUIDANCE):
        self.model, self.guidance = model, guidance
        self.cond, self.uncond = text.encode(list(prompts)), text.encode([""] * len(prompts))

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
