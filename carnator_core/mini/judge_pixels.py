"""What both halves of the judge do to pictures: spread, blur, average; and the texture's covariance."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

# The texture's covariance over RGB, up to a factor: mostly grey light, some tint, and room for a model's own noise.
NOISE = 0.81 * torch.ones(3, 3) + 0.3 * torch.eye(3)
NEARBY = 5  # pixels, the side of the square that a local mean is taken over


def grow(mask: torch.Tensor, pixels: int) -> torch.Tensor:
    """(T, H, W) of 0 and 1, every 1 spread by so many pixels."""
    return F.max_pool2d(mask[:, None], 2 * pixels + 1, 1, pixels)[:, 0]


def blur(frames: torch.Tensor, sigma: float) -> torch.Tensor:
    """Gaussian blur of (..., H, W); sigma in pixels, 0 changes nothing."""
    if sigma == 0:
        return frames
    reach = max(1, math.ceil(2.5 * sigma))
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
    weights = weights / weights.sum()
    flat = frames.reshape(-1, 1, *frames.shape[-2:])
    flat = F.conv2d(F.pad(flat, (reach, reach, 0, 0), mode="replicate"), weights.view(1, 1, 1, -1))
    flat = F.conv2d(F.pad(flat, (0, 0, reach, reach), mode="replicate"), weights.view(1, 1, -1, 1))
    return flat.reshape(frames.shape)


def box(frames: torch.Tensor, side: int) -> torch.Tensor:
    return F.avg_pool2d(frames, side, 1, side // 2, count_include_pad=False)


def local_mean(rest: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
    """Mean of `rest` (3, T, H, W) over the free pixels around; 0 far from any."""
    return box(rest * free, NEARBY) / (box(free[None], NEARBY) + 0.02)
