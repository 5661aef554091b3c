"""The plan of a run: the kind of every step, fixed before the steps it speaks of are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..schedule import finish_steps, probe_steps


@dataclass(frozen=True)
class Plan:
    """Steps by index; `skipped` ones are answered without a forward, all others are the model's own."""

    sigmas: tuple[float, ...]  # of the steps, without the closing level
    skipped: frozenset[int]

    def __post_init__(self) -> None:
        if any(not 0 <= i < len(self.sigmas) for i in self.skipped):
            raise ValueError("a plan skips a step that the schedule does not have")

    @property
    def forwards(self) -> int:
        return len(self.sigmas) - len(self.skipped)

    def kind(self, step: int) -> str:
        return "skipped" if step in self.skipped else "dense"

    def __str__(self) -> str:
        return "".join("." if i in self.skipped else "#" for i in range(len(self.sigmas)))


def dense_plan(sigmas: Sequence[float]) -> Plan:
    return Plan(tuple(sigmas), frozenset())


def resume_plan(sigmas: Sequence[float], resume: int) -> Plan:
    """Skip everything between the probe and step `resume`."""
    return Plan(tuple(sigmas), frozenset(range(probe_steps(len(sigmas)), resume)))


def paced_plan(sigmas: Sequence[float], run: int, until: int | None = None, probe: int | None = None) -> Plan:
    """After the probe, `run` skipped steps for every dense one, up to step `until` (default: the dense finish)."""
    if run < 0:
        raise ValueError(f"the number of steps skipped in a row must not be negative, got {run}")
    first = probe_steps(len(sigmas)) if probe is None else probe
    last = len(sigmas) - finish_steps(len(sigmas))
    last = last if until is None else min(until, last)
    return Plan(tuple(sigmas), frozenset(i for i in range(first, last) if (i - first) % (run + 1) < run))
