"""A donor's denoising as a function: sigma -> its guided x0 prediction."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..schedule import bracket


class Trajectory:
    """x0 predictions at stored noise levels, linear in sigma between them, clamped at the ends.

    `sigmas` descends strictly, (S,); `predictions` is (S, *latent) in any floating dtype.
    """

    def __init__(self, sigmas: Sequence[float], predictions: torch.Tensor):
        if len(sigmas) != len(predictions) or not len(sigmas):
            raise ValueError(f"{len(sigmas)} noise levels for {len(predictions)} predictions")
        if any(a <= b for a, b in zip(sigmas[:-1], sigmas[1:], strict=True)):
            raise ValueError("the noise levels of a trajectory must descend strictly")
        self.sigmas = tuple(float(s) for s in sigmas)
        self.predictions = predictions

    def at(self, sigma: float) -> torch.Tensor:
        """The prediction at a noise level, in float32."""
        i, j, weight = bracket(sigma, self.sigmas)
        first = self.predictions[i].float()
        return first if i == j else torch.lerp(first, self.predictions[j].float(), weight)

    def thinned(self, keep: Sequence[int]) -> Trajectory:
        """The same trajectory remembered at fewer levels."""
        return Trajectory([self.sigmas[i] for i in keep], self.predictions[list(keep)])
