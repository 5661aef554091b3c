"""Muon (momentum orthogonalised by Newton-Schulz), batched over matrices of one shape, in a chosen precision.

torch.optim.Muon always works in bfloat16, which CPUs without bfloat16 instructions compute some twenty times slower.
Step size as in Moonshot's Muon: 0.2 sqrt(max(rows, columns)) of the orthogonal update, so AdamW's rate fits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(update: torch.Tensor, iterations: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Nearest semi-orthogonal matrices, roughly: (n, rows, columns) -> the same shape, singular values near 1."""
    tall = update.shape[-2] > update.shape[-1]
    x = (update.mT if tall else update).to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return (x.mT if tall else x).to(update.dtype)


class Muon(torch.optim.Optimizer):
    """For weight matrices of hidden layers only; give everything else to AdamW."""

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            same_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    same_shape[p.shape].append(p)
            for shape, params in same_shape.items():
                updates = []
                for p in params:
                    if "momentum" not in self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
                    buffer = self.state[p]["momentum"]
                    buffer.mul_(group["momentum"]).add_(p.grad)
                    updates.append(p.grad + group["momentum"] * buffer)
                directions = orthogonalise(torch.stack(updates), dtype=self.dtype)
                rate = group["lr"] * 0.2 * max(shape) ** 0.5
                for p, direction in zip(params, directions, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-rate)
