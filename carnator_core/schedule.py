"""Noise schedules, spoken in sigma, and the translation of every parametrisation into x0.

Sigma is whatever noise level the host's sampler counts in. Steps are found by sigma, never by counting calls:
stochastic and second-order samplers call the model at levels of their own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import torch

PROBE_SHARE = 0.08  # paper, section 4: 4 of 50 steps
FINISH_SHARE = 0.06  # last steps are the model's own


def probe_steps(steps: int, share: float = PROBE_SHARE) -> int:
    """How many dense steps open a run: a share of the schedule, at least one."""
    if steps < 1:
        raise ValueError(f"a schedule needs at least one step, got {steps}")
    return max(1, round(share * steps))


def finish_steps(steps: int, share: float = FINISH_SHARE) -> int:
    """How many dense steps close a run: a share of the schedule, at least one."""
    return max(1, round(share * steps))


def step_of(sigma: float, sigmas: Sequence[float], tolerance: float = 1e-5) -> int:
    """Index of the step that a model call at `sigma` belongs to: the last level that is not below it.

    `sigmas` descends. Calls between two levels (second-order samplers) belong to the step they are made in; a call
    above the first level belongs to step 0.
    """
    slack = tolerance * max(1.0, abs(sigmas[0]))
    ascending = [-s for s in sigmas]
    return max(0, bisect_right(ascending, -(sigma - slack)) - 1)


def is_level(sigma: float, sigmas: Sequence[float], tolerance: float = 1e-5) -> bool:
    """Whether the sampler's own schedule holds this noise level."""
    slack = tolerance * max(1.0, abs(sigmas[0]))
    return any(abs(sigma - s) <= slack for s in sigmas)


def to_x0(parametrisation: str, x: torch.Tensor, output: torch.Tensor, sigma: float) -> torch.Tensor:
    """The clean prediction behind a model's output.

    flow: x = (1 - sigma) x0 + sigma noise, output = noise - x0, sigma in [0, 1].
    epsilon: x = x0 + sigma noise (variance exploding), output = noise.
    v: x = alpha x0 + s noise with alpha^2 + s^2 = 1, s = sigma here in [0, 1], output = alpha noise - s x0.
    """
    if parametrisation == "flow":
        return x - sigma * output
    if parametrisation == "epsilon":
        return x - sigma * output
    if parametrisation == "v":
        return (1 - sigma**2) ** 0.5 * x - sigma * output
    raise ValueError(f"unknown parametrisation {parametrisation!r}")


def from_x0(parametrisation: str, x: torch.Tensor, x0: torch.Tensor, sigma: float) -> torch.Tensor:
    """The model output that stands for a clean prediction; inverse of `to_x0`, sigma > 0."""
    if sigma <= 0:
        raise ValueError("no model output stands for an x0 prediction at sigma 0")
    if parametrisation in ("flow", "epsilon"):
        return (x - x0) / sigma
    if parametrisation == "v":
        return ((1 - sigma**2) ** 0.5 * x - x0) / sigma
    raise ValueError(f"unknown parametrisation {parametrisation!r}")


def signal_ratio(sigma: float, parametrisation: str = "flow") -> float:
    """Amplitude of the clean part of a noisy latent over that of its noise; infinite where there is no noise."""
    if sigma <= 0:
        return math.inf
    if parametrisation == "epsilon":
        return 1 / sigma
    if parametrisation == "v":
        return max(0.0, 1 - sigma**2) ** 0.5 / sigma
    return max(0.0, 1 - sigma) / sigma


def log_snr(sigma: float, parametrisation: str = "flow") -> float:
    """Half the log signal-to-noise ratio at a level, bounded at both ends; in it a prediction changes evenly."""
    least = 1e-4
    bounded = max(sigma, least) if parametrisation == "epsilon" else min(max(sigma, least), 1 - least)
    return math.log(signal_ratio(bounded, parametrisation))


def bracket(sigma: float, levels: Sequence[float]) -> tuple[int, int, float]:
    """(i, j, w): the value at `sigma` is (1 - w) value[i] + w value[j]; `levels` descends; clamped at its ends."""
    if sigma >= levels[0]:
        return 0, 0, 0.0
    if sigma <= levels[-1]:
        return len(levels) - 1, len(levels) - 1, 0.0
    j = next(k for k, level in enumerate(levels) if level <= sigma)
    i = j - 1
    return i, j, (levels[i] - sigma) / (levels[i] - levels[j])
