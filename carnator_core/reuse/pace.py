"""Pace: which steps of a hit are answered, decided from step to step by how well the answers hold.

Looks are evenly spaced in log signal-to-noise ratio, in which a prediction changes evenly. At every look the answer
that would have been given is compared with the prediction that was computed: where it is off by more than the policy
tolerates, the next look comes sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..schedule import finish_steps, log_snr

GROWTH = 1.5  # the error of an answer grows with the way since the last look about to this power


def off_by(answer: torch.Tensor, truth: torch.Tensor) -> float:
    """Root mean square distance in deviations of the truth."""
    return float((answer.float() - truth.float()).pow(2).mean().sqrt() / truth.float().std().clamp_min(1e-6))


@dataclass
class Pace:
    """`computed`: how many steps between probe and finish are computed while answers hold; `tolerance`: as `off_by`;
    `refresh`: of the computed steps every how-many-th is full while the others may compute a region."""

    sigmas: Sequence[float]
    probe: int
    computed: int
    tolerance: float
    refresh: int = 1
    parametrisation: str = "flow"
    errors: list[float] = field(default_factory=list)
    next: int = field(init=False)  # the next step to be computed
    last: int = field(init=False)  # the first step of the dense finish

    def __post_init__(self) -> None:
        self.last = len(self.sigmas) - finish_steps(len(self.sigmas))
        self._levels = [log_snr(sigma, self.parametrisation) for sigma in self.sigmas]
        self._way = (self._levels[self.last] - self._levels[self.probe - 1]) / (self.computed + 1)
        self._done, self._looked = 0, self.probe - 1
        self.next = self._after(self.probe - 1, self._way)

    def kind(self, step: int) -> str:
        """dense, skipped or region."""
        if not self.probe <= step < self.last:
            return "dense"
        if step < self.next:
            return "skipped"
        return "region" if self._done % self.refresh else "dense"

    def took(self, step: int, error: float | None) -> None:
        """A step behind the probe was computed; `error` of the answer in its place, None where it was not full."""
        way = self._way
        if error is not None:
            self.errors.append(error)
            walked = self._levels[step] - self._levels[self._looked]
            way = min(way, walked * (self.tolerance / max(error, 1e-9)) ** (1 / GROWTH))
        self._done, self._looked = self._done + 1, step
        self.next = self._after(step, way)

    def _after(self, step: int, way: float) -> int:
        """The step nearest to so far behind this one, at least the following."""
        wanted = self._levels[step] + way
        return min(range(step + 1, self.last + 1), key=lambda i: abs(self._levels[i] - wanted), default=self.last)
