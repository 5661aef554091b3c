"""The embedded model's latent codec: exact, invertible, without weights.

A 2 x 2 pixel block (12 numbers) becomes one latent position: space-to-depth, then a fixed orthonormal map from 12 to
16 channels, so `decode(encode(x))` is x up to rounding and the decoder ignores what no clip can hold (the 4 spare
dimensions). The map is a cosine basis: any torch, any machine builds the same one.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange

CHANNELS = 16
BLOCK = 2
SCALE = 2.2  # latents of the world's clips then have about unit deviation


def _basis() -> torch.Tensor:
    """(16, 12), orthonormal columns: the first twelve cosines of the orthonormal DCT-II over 16 points."""
    n = torch.arange(16, dtype=torch.float64)
    k = torch.arange(12, dtype=torch.float64)
    basis = torch.cos(math.pi * (n[:, None] + 0.5) * k[None] / 16) * math.sqrt(2 / 16)
    basis[:, 0] /= math.sqrt(2)
    return basis


def encode(clip: torch.Tensor) -> torch.Tensor:
    """(B, 3, T, H, W) in [-1, 1] -> latent (B, 16, T, H/2, W/2)."""
    blocks = rearrange(clip, "b c t (h p) (w q) -> b t h w (c p q)", p=BLOCK, q=BLOCK)
    return rearrange(blocks @ _basis().to(clip).T * SCALE, "b t h w c -> b c t h w")


def decode(latent: torch.Tensor) -> torch.Tensor:
    """Latent (B, 16, T, h, w) -> clip (B, 3, T, 2h, 2w), clamped to [-1, 1]."""
    blocks = rearrange(latent, "b c t h w -> b t h w c") @ _basis().to(latent) / SCALE
    return rearrange(blocks, "b t h w (c p q) -> b c t (h p) (w q)", c=3, p=BLOCK, q=BLOCK).clamp(-1, 1)
