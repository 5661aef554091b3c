"""Where two requests show the same thing, told by their x0 predictions at one noise level."""

from __future__ import annotations

import torch

from ..grid import TokenGrid, smooth

SOFTNESS = 2.0  # mean squared difference (latents of unit deviation) at which trust has fallen to 1/e


def agreement(target: torch.Tensor, donor: torch.Tensor, grid: TokenGrid, softness: float = SOFTNESS) -> torch.Tensor:
    """U in [0, 1] for every latent position, (B, 1, T, H, W), from two x0 predictions at one noise level."""
    return grid.to_latent(_by_token(target, donor, grid, softness), target.shape)


def mean_agreement(target: torch.Tensor, donor: torch.Tensor, grid: TokenGrid) -> float:
    """Mean of U over the tokens, in [0, 1]; the donor's prediction may lie on another device."""
    return float(_by_token(target, donor.to(target.device), grid, SOFTNESS).mean())


def _by_token(target: torch.Tensor, donor: torch.Tensor, grid: TokenGrid, softness: float) -> torch.Tensor:
    difference = (target.float() - donor.float()).pow(2).mean(1, keepdim=True)
    return torch.exp(-smooth(grid.to_tokens(difference), 1) / softness)
