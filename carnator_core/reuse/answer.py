"""Answers for skipped steps, in x0.

    D(sigma) = F_target(sigma) + U (x0_donor(sigma) - F_donor(sigma))

F extends a course linearly from its last two dense steps. The target's own forecast is a strong answer by itself; the
donor, whose true course is known, lends what such a forecast misses: F_donor is made from the donor's predictions at
the very same two levels, and its error is added where the agreement U says that the two requests show the same thing.
At a dense step nothing is answered. A multistep sampler sees one consistent history of predictions.
"""

from __future__ import annotations

import torch

from ..grid import TokenGrid
from ..signature.agreement import SOFTNESS, agreement
from .trajectory import Trajectory


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

    def __init__(self, slope: float = 1.0) -> None:
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
    """The target's own forecast, corrected where both agree by what the same forecast of the donor misses."""

    def __init__(self, donor: Trajectory, grid: TokenGrid, softness: float = SOFTNESS):
        self.donor, self.grid, self.softness = donor, grid, softness
        self._own, self._lent = ForecastAnswer(), ForecastAnswer()
        self._trust: torch.Tensor | None = None

    def observe(self, sigma: float, x0: torch.Tensor) -> None:
        """A dense step's own prediction."""
        lent = self.donor.at(sigma).to(x0.device)
        self._own.observe(sigma, x0)
        self._lent.observe(sigma, lent)
        self._trust = agreement(x0, lent, self.grid, self.softness)

    def answer(self, sigma: float) -> torch.Tensor:
        """The prediction for a step that is not computed, in the dtype of what was observed."""
        own = self._own.answer(sigma)
        missed = self.donor.at(sigma).to(own.device) - self._lent.answer(sigma)
        return (own + self._trust * missed).to(own.dtype)
