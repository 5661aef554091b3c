"""Paired figures with intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

PSNR_CEILING = 99.0  # of clips that are equal, so that means stay finite
RESAMPLES = 10_000


def psnr_each(found: torch.Tensor, truth: torch.Tensor, peak: float) -> list[float]:
    """PSNR in dB of every clip of a batch, at most `PSNR_CEILING`."""
    error = (found.float() - truth.float()).pow(2).flatten(1).mean(1).double().numpy()
    return np.minimum(10 * np.log10(peak**2 / np.maximum(error, 1e-30)), PSNR_CEILING).tolist()


def interval(values: Sequence[float], seed: int = 0, level: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high): mean and percentile bootstrap interval. ValueError without values."""
    data = np.asarray(values, dtype=np.float64)
    if not len(data):
        raise ValueError("an interval needs at least one value")
    rng = np.random.default_rng(seed)
    means = data[rng.integers(0, len(data), (RESAMPLES, len(data)))].mean(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(data.mean()), float(low), float(high)


def rounded(found: tuple[float, float, float], digits: int = 4) -> list[float]:
    return [round(value, digits) for value in found]
