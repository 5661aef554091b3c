"""Answers of a run with region steps.

Outside the region only full steps are truth, within it region steps are too. So two answerers run side by side, one
told of the former alone and one of both, each with its own account of what it owes, and W says which of them counts
where.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from .correction import Answerer, CorrectedAnswer
from .plan import Plan


class PartlyCorrected:
    """As `CorrectedAnswer`, for a plan with region steps; `make` builds the answerers below."""

    def __init__(self, make: Callable[[], Answerer], plan: Plan, parametrisation: str = "flow"):
        self._outside = CorrectedAnswer(make(), plan, parametrisation)
        self._within = CorrectedAnswer(make(), plan, parametrisation)
        self.plan = plan
        self.error: float | None = None
        self.weight: torch.Tensor | None = None  # W of the region steps before and behind; None for no region
        self._base: tuple[float, torch.Tensor] | None = None  # level and answer of the region step under way

    @property
    def plan(self) -> Plan:
        return self._within.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._within.plan = plan
        self._outside.plan = replace(plan, skipped=plan.skipped | plan.region, region=frozenset())

    def observe(self, sigma: float, x0: torch.Tensor) -> None:
        """A full step's prediction."""
        weight = self.weight
        self._outside.observe(sigma, x0, None if weight is None else 1 - weight)
        self._within.observe(sigma, x0, weight)
        errors = [self._outside.error] if weight is None else [self._outside.error, self._within.error]
        known = [error for error in errors if error is not None]
        self.error = math.hypot(*known) if known else None

    def answer(self, sigma: float) -> torch.Tensor:
        """The prediction for a skipped step."""
        outside, within = self._outside.answer(sigma), self._within.answer(sigma)
        return outside if self.weight is None else self.weight * within + (1 - self.weight) * outside

    def blended(self, sigma: float, x0: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """W x0 + (1 - W) the answer, of a region step; also right for a single guidance branch, as guidance leaves what
        both share alone."""
        if self._base is None or self._base[0] != sigma:
            self._base = sigma, self._outside.answer(sigma)
        return weight * x0.float() + (1 - weight) * self._base[1]

    def observe_region(self, sigma: float, x0: torch.Tensor, weight: torch.Tensor) -> None:
        """A region step's blended prediction."""
        self.weight = weight
        self._within.observe(sigma, x0, weight)
        self.error = self._within.error
