"""The token grid of a video transformer: how latent positions, tokens and lengths in tokens relate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

REFERENCE_ROWS = 22  # token rows of the paper's 704-pixel clips; its radii are told on that grid


@dataclass(frozen=True)
class TokenGrid:
    """Tokens lie in (t, h, w) order; one covers `patch` latent positions."""

    t: int
    h: int
    w: int
    patch: tuple[int, int, int] = (1, 2, 2)

    @classmethod
    def of_latent(cls, shape: tuple[int, ...], patch: tuple[int, int, int] = (1, 2, 2)) -> TokenGrid:
        """The grid of a latent (..., T, H, W); sides are rounded up, as Wan pads them."""
        sides = [-(-n // p) for n, p in zip(shape[-3:], patch, strict=True)]
        return cls(*sides, patch)

    @property
    def tokens(self) -> int:
        return self.t * self.h * self.w

    def scaled(self, tokens: float) -> int:
        """A length told on the paper's grid (2 for active, 3 for context) on this one, at least 1."""
        return max(1, round(tokens * self.h / REFERENCE_ROWS))

    def to_tokens(self, latent: torch.Tensor) -> torch.Tensor:
        """Mean over each patch: (B, C, T, H, W) -> (B, C, t, h, w)."""
        pt, ph, pw = self.patch
        t, h, w = latent.shape[-3:]
        pad = (0, self.w * pw - w, 0, self.h * ph - h, 0, self.t * pt - t)
        if any(pad):
            latent = F.pad(latent, pad, mode="replicate")
        return F.avg_pool3d(latent, self.patch)

    def to_latent(self, tokens: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Every token's value to the latent positions it covers: (B, C, t, h, w) -> (B, C, T, H, W)."""
        out = tokens
        for axis, p in zip((-3, -2, -1), self.patch, strict=True):
            out = out.repeat_interleave(p, dim=axis)
        t, h, w = shape[-3:]
        return out[..., :t, :h, :w]


def dilate(mask: torch.Tensor, radius: int) -> torch.Tensor:
    """Chebyshev dilation of a mask (..., t, h, w) within each frame."""
    if radius <= 0:
        return mask
    flat = mask.reshape(-1, 1, *mask.shape[-2:]).float()
    grown = F.max_pool2d(flat, 2 * radius + 1, stride=1, padding=radius)
    return (grown > 0.5).reshape(mask.shape) if mask.dtype == torch.bool else grown.reshape(mask.shape).to(mask)


def smooth(field: torch.Tensor, radius: int) -> torch.Tensor:
    """Mean over a (2 radius + 1) square within each frame; borders average what exists. (..., t, h, w)."""
    if radius <= 0:
        return field
    flat = field.reshape(-1, 1, *field.shape[-2:])
    out = F.avg_pool2d(flat, 2 * radius + 1, stride=1, padding=radius, count_include_pad=False)
    return out.reshape(field.shape)
