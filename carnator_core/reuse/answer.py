"""Answers for skipped steps, in x0.

    D(sigma) = x0_target(p) + U (x0_donor(sigma) - x0_donor(p))

p is the noise level of the target's latest dense step (the anchor). Inside the agreement U = 1 the answer follows the
donor's refinement since then; where U = 0 it holds the target's own prediction. At a dense step nothing is answered,
the anchor moves. A multistep sampler sees one consistent history of predictions.
"""

from __future__ import annotations

import torch

from ..grid import TokenGrid, smooth
from .trajectory import Trajectory

SOFTNESS = 0.05  # mean squared difference (latents of unit deviation) at which trust has fallen to 1/e


def agreement(target: torch.Tensor, donor: torch.Tensor, grid: TokenGrid, softness: float = SOFTNESS) -> torch.Tensor:
    """U in [0, 1] for every latent position, (B, 1, T, H, W), from two x0 predictions at one noise level."""
    difference = (target.float() - donor.float()).pow(2).mean(1, keepdim=True)
    tokens = smooth(grid.to_tokens(difference), 1)
    return grid.to_latent(torch.exp(-tokens / softness), target.shape)


class DonorAnswer:
    """Answers from a donor's trajectory, trusted where target and donor agree at the anchor."""

    def __init__(self, donor: Trajectory, grid: TokenGrid, softness: float = SOFTNESS):
        self.donor, self.grid, self.softness = donor, grid, softness
        self._anchor: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def observe(self, sigma: float, x0: torch.Tensor) -> None:
        """A dense step's own prediction: the new anchor."""
        lent = self.donor.at(sigma).to(x0.device)
        self._anchor = x0, lent, agreement(x0, lent, self.grid, self.softness)

    def answer(self, sigma: float) -> torch.Tensor:
        """The prediction for a step that is not computed, in the anchor's dtype."""
        if self._anchor is None:
            raise RuntimeError("no dense step has been observed yet; the probe must come first")
        own, lent, trust = self._anchor
        return (own + trust * (self.donor.at(sigma).to(own.device) - lent)).to(own.dtype)


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
    """Control without history: the target's last two own predictions, extended linearly in sigma at a given slope."""

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
