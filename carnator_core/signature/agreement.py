"""Where two requests show the same thing, told by their x0 predictions at one noise level."""

from __future__ import annotations

import torch

from ..grid import TokenGrid, smooth

SOFTNESS = 2.0  # mean squared difference (latents of unit deviation) at which trust has fallen to 1/e


def agreement(target: torch.Tensor, donor: torch.Tensor, grid: TokenGrid, softness: float = SOFTNESS) -> torch.Tensor:
    """U in [0, 1] for every latent position, (B, 1, T, H, W), from two x0 predictions at one noise level."""
    difference = (target.float() - donor.float()).pow(2).mean(1, keepdim=True)
    tokens = smooth(grid.to_tokens(difference), 1)
    return grid.to_latent(torch.exp(-tokens / softness), target.shape)
