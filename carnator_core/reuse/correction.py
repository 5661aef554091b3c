"""Corrected answers: what an answer got wrong is known at the next computed step, and made up for after it.

An answer between two computed predictions is a forecast when it is given and, once the second is there, can be told
again by interpolation. Every sampler here follows d(x / sigma) = x0 d(r), with r the ratio of signal to noise, so the
difference of the two has moved x / sigma by its integral over r, a debt. The answers of the next skipped steps carry
it back, spread evenly over their r. A host need not know: only its predictions are touched. What is owed at the end of
the last skipped steps stays unpaid; it was seen to cost 0.1 dB.

(The same equation makes exponential integrators of diffusion samplers, as in DPM-Solver, Lu et al. 2022.)
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..schedule import signal_ratio, step_of
from .plan import Plan


class Answerer(Protocol):
    """Told of computed predictions in order, it has an opinion on the one at any level."""

    def observe(self, sigma: float, x0: torch.Tensor) -> None: ...

    def answer(self, sigma: float) -> torch.Tensor: ...


class CorrectedAnswer:
    """An answerer whose errors are made up for, once they are known; itself one, asked once for each skipped step.

    `plan` tells how long the skipped stretches are; their levels must be above 0, as no sampler calls a model there.
    """

    def __init__(self, answerer: Answerer, plan: Plan, parametrisation: str = "flow"):
        self.plain, self.plan = answerer, plan
        self._ratios = [signal_ratio(sigma, parametrisation) for sigma in plan.sigmas]
        self._given: list[int] = []  # skipped steps since the last computed one
        self._sum: torch.Tensor | None = None  # of their answers, each times its step in r
        self._debt: torch.Tensor | None = None
        self.error: float | None = None  # of the last stretch's mean answer, in deviations of a prediction

    def observe(self, sigma: float, x0: torch.Tensor, counted: torch.Tensor | None = None) -> None:
        """A computed prediction. `counted`: weights in [0, 1], of where the answers were used, for `error`; default
        everywhere."""
        self.plain.observe(sigma, x0)
        self.error = None
        if not self._given:
            return  # what is owed stays owed
        told_again = sum(self.plain.answer(self.plan.sigmas[i]) * self._length(i) for i in self._given)
        self._debt = told_again - self._sum
        length = sum(self._length(i) for i in self._given)
        if length > 0:
            off = self._debt if counted is None else self._debt * counted.sqrt()
            self.error = float(off.pow(2).mean().sqrt() / (length * x0.float().std()).clamp_min(1e-12))
        self._given, self._sum = [], None

    def answer(self, sigma: float) -> torch.Tensor:
        """The prediction for a skipped step, with its part of the debt."""
        index = step_of(sigma, self.plan.sigmas)
        x0 = self.plain.answer(sigma)
        part = x0 * self._length(index)
        self._given.append(index)
        self._sum = part if self._sum is None else self._sum + part
        stretch = self._stretch(index)
        return x0 if self._debt is None or stretch <= 0 else x0 + self._debt / stretch

    def _length(self, index: int) -> float:
        """The step in r from one level to the next."""
        return self._ratios[min(index + 1, len(self._ratios) - 1)] - self._ratios[index]

    def _stretch(self, index: int) -> float:
        """The way in r over all skipped steps in a row around this one."""
        first = last = index
        while first - 1 in self.plan.skipped:
            first -= 1
        while last + 1 in self.plan.skipped:
            last += 1
        return self._ratios[min(last + 1, len(self._ratios) - 1)] - self._ratios[first]
