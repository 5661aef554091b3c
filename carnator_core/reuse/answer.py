"""Answers for skipped steps, in x0.

    D(sigma) = F(sigma) + U (x0_target(p) + x0_donor(sigma) - x0_donor(p) - F(sigma))

p is the noise level of the target's latest dense step (the anchor). Where the agreement U is 1 the answer follows the
donor's refinement since then; where it is 0 it follows F, the target's own forecast from its last two dense steps.
At a dense step nothing is answered, the anchor moves. A multistep sampler sees one consistent history of predictions.
"""

from __future__ import annotations

import torch

from ..grid import TokenGrid, smooth
from .trajectory import Trajectory

SOFTNESS = 0.5  # mean squared difference (latents of unit deviation) at which trust has fallen to 1/e


def agreement(target: torch.Tensor, donor: torch.Tensor, grid: TokenGrid, softness: float = SOFTNESS) -> torch.Tensor:
    """U in [0, 1] for every latent position, (B, 1, T, H, W), from two x0 predictions at one noise level."""
    difference = (target.float() - donor.float()).pow(2).mean(1, keepdim=True)
    tokens = smooth(grid.to_tokens(difference), 1)
    return grid.to_latent(torch.exp(-tokens / softness), target.shape)


class FrozenAnswer:
    """Control without history: the target's latest own prediction is held."""

    def __init__(self) -> None:
        self._own: torch.Tensor | None = None

    def observe(self, sigma: float, x0: torch.Tensor) -> None:
        self._own = x0

    def answer(self, sigma: float) -> torch.Tensor:
        if self._own is None:
            raise RuntimeError("no dense step has been observed yet; the probe must come first")
        return self._own


class ForecastAnswer:
    """Control without history: the target's last two own predictions, extended linearly in sigma at a given slope.

    Half the slope is the better guess: the course flattens towards the end.
    """

    def __init__(self, slope: float = 0.5) -> None:
        self.slope = slope
        self._seen: list[tuple[float, torch.Tensor]] = []

    def observe(self, sigma: float, x0: torch.Tensor) -> None:
        self._seen = [*self._seen[-1:], (sigma, x0)]

    def answer(self, sigma: float) -> torch.Tensor:
        if not self._seen:
            raise RuntimeError("no dense step has been observed yet; the probe must come first")
        if len(self._seen) == 1:
            return self._seen[0][1]
        (before, first), (latest, second) = self._seen
        return second + self.slope * (second - first) * ((sigma - latest) / (latest - before))


class DonorAnswer:
    """Answers from a donor's trajectory where target and donor agree at the anchor, from the own forecast elsewhere."""

    def __init__(self, donor: Trajectory, grid: TokenGrid, softness: float = SOFTNESS):
        self.donor, self.grid, self.softness = donor, grid, softness
        self.own = ForecastAnswer()
        self._anchor: tuple[torch.Tensor, torch.Tensor] | None = None

    def observe(self, sigma: float, x0: torch.Tensor) -> None:
        """A dense step's own prediction: the new anchor."""
        lent = self.donor.at(sigma).to(x0.device)
        self._anchor = x0 - lent, agreement(x0, lent, self.grid, self.softness)
        self.own.observe(sigma, x0)

    def answer(self, sigma: float) -> torch.Tensor:
        """The prediction for a step that is not computed, in the anchor's dtype."""
        forecast = self.own.answer(sigma)
        offset, trust = self._anchor
        return torch.lerp(forecast.float(), offset + self.donor.at(sigma).to(offset.device), trust).to(forecast.dtype)
