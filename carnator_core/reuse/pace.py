"""Pace: which steps of a joint run are answered, decided from step to step by how well the answers hold.

At every full step the answer that would have been given can be compared with the prediction that was computed. Where it
is off by more than the policy tolerates, fewer steps are answered before the next look; where it holds, more, up to the
depth that the risk allows. A fixed plan knows nothing of a clip that goes another way after the probe.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..schedule import finish_steps

GROWTH = 1.5  # the error of an answer grows with the steps since the last look about to this power


def off_by(answer: torch.Tensor, truth: torch.Tensor) -> float:
    """Root mean square distance in deviations of the truth."""
    return float((answer.float() - truth.float()).pow(2).mean().sqrt() / truth.float().std().clamp_min(1e-6))


@dataclass
class Pace:
    """`depth`: most steps answered in a row; `tolerance`: as `off_by`; `refresh`: of the computed steps every
    how-many-th is full while the others may compute a region."""

    steps: int
    probe: int
    depth: int
    tolerance: float
    refresh: int = 1
    next: int = field(init=False)  # the next step to be computed
    errors: list[float] = field(default_factory=list)
    _computed: int = 0
    _gap: int = field(init=False)

    def __post_init__(self) -> None:
        self.next = self.probe + self.depth
        self._gap = self.depth

    @property
    def last(self) -> int:
        """The first step of the dense finish."""
        return self.steps - finish_steps(self.steps)

    def kind(self, step: int) -> str:
        """dense, skipped or region."""
        if not self.probe <= step < self.last:
            return "dense"
        if step < self.next:
            return "skipped"
        return "region" if self._computed % self.refresh else "dense"

    def computed(self, step: int, error: float | None) -> None:
        """A step behind the probe was computed; `error` of the answer in its place, None where it was not full."""
        self._computed += 1
        if error is not None:
            self.errors.append(error)
            self._gap = self._allowed(error)
        self.next = step + 1 + self._gap

    def _allowed(self, error: float) -> int:
        """How many steps may be answered if this many gave this error."""
        looked = self._gap + 1  # steps from one look to the next
        room = (self.tolerance / max(error, 1e-9)) ** (1 / GROWTH)
        return int(max(0, min(self.depth, looked * room - 1)))
