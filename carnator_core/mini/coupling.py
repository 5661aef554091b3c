"""Which pattern belongs to which noise: training pairs every noise with the clip whose pattern it already resembles.

A prompt leaves open where the background's pattern lies. Paired at random, noise says nothing of it, and at the first
steps of sampling a model can only predict the mean over all places, which is grey; the decision then falls piece by
piece, and pieces that decide apart bend what should be one rigid lattice. Here the place is read from the noise
itself, so there is one right answer from the first step on, and two prompts with the same noise and the same camera
get the same place. The noise stays an exact normal draw: the clip is chosen for it, never the noise for the clip.
(Choosing pairs to straighten the flow: Tong et al. 2023, arXiv 2302.00482; Li et al. 2024, arXiv 2406.12303.)
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from . import codec, world


@lru_cache
def _waves(camera: str, size: int) -> torch.Tensor:
    """(2, 2, T, size, size): the products of sine and cosine of x with sine and cosine of y, in the world."""
    angle = world.world_points(camera, size) * (2 * math.pi / world.PATTERN_PERIOD)
    x, y = (torch.stack((a.sin(), a.cos())) for a in angle.unbind(-1))
    return x[:, None] * y[None]


def phase_of(noise: torch.Tensor, camera: str) -> tuple[float, float]:
    """Where the pattern lies that this noise resembles most.

    `noise`: a latent (16, T, h, w), of world.FRAMES frames. A shifted product of two sines is a sum of four fixed
    products; the largest overlap with the noise of all shifts is the first singular value of the four overlaps.
    """
    grey = codec.decode(noise[None])[0].sum(0)
    u, _, vh = torch.linalg.svd((_waves(camera, grey.shape[-1]) * grey).sum((-3, -2, -1)))
    angles = torch.atan2(u[1, 0], u[0, 0]), torch.atan2(vh[0, 1], vh[0, 0])
    x, y = (float(a) * world.PATTERN_PERIOD / (2 * math.pi) for a in angles)
    return x, y
