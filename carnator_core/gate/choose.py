"""Which of the bank's donors a run is to borrow from, or which one to speak of where none can lend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from ..bank import Bank, Entry, EntryInfo
from ..grid import TokenGrid
from ..request import Request, same_noise
from ..signature.agreement import mean_agreement
from ..signature.early import EarlySignature
from ..signature.evidence import Evidence, gather
from .decide import Verdict, judge, judge_other_noise, schedules_differ
from .policy import Policy

T = TypeVar("T")

CANDIDATES = 10  # paper: K = 10


@dataclass(frozen=True)
class Target:
    """What the probe has made of the run that looks for a donor. `self_qk`: as `Taps` holds it."""

    request: Request
    signature: EarlySignature
    grid: TokenGrid
    self_qk: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True)
class Choice:
    """A donor, what it may lend, and what differs; no evidence for one that began with other noise."""

    entry: Entry
    verdict: Verdict
    evidence: Evidence | None


def choose(
    target: Target, bank: Bank, policy: Policy, wanted: str | None, warn: Callable[[str], None]
) -> Choice | None:
    """The most promising donor, accepted or not; None without any. `wanted`: the only entry to look at."""
    return next((found for found in _Donors(target, bank, policy, wanted, warn).by_promise() if found), None)


@dataclass(frozen=True)
class _Candidate:
    """A donor that began with the run's noise. `risk`: what the gate judges; `unfit`: why its course cannot answer."""

    entry: Entry
    risk: float
    unfit: str | None


@dataclass(frozen=True)
class _Donors:
    target: Target
    bank: Bank
    policy: Policy
    wanted: str | None
    warn: Callable[[str], None]

    def by_promise(self) -> Iterator[Choice | None]:
        """First those that can lend, by their risk alone; then those that cannot, and tell what is in the way.

        What differs by name and by place is gathered when a donor's turn comes, so of one as a rule.
        """
        candidates = sorted(self._candidates(), key=lambda one: one.risk)
        yield from (self._judge(one) for one in candidates if one.unfit is None)
        others = self._of_other_noise()
        yield from (self._judge_other(info) for info in others if self._unfit(info.prediction_sigmas) is None)
        yield from (self._judge(one) for one in candidates if one.unfit is not None)
        yield from (self._judge_other(info) for info in others)

    def _candidates(self) -> list[_Candidate]:
        request = self.target.request
        near = [] if self.wanted else self.bank.recall(request, CANDIDATES, only_same_noise=True)
        ids = [self.wanted] if self.wanted else [info.id for info in near]
        compared = (self._compared(entry) for entry in map(self._opened, ids) if entry)
        return [one for one in compared if one]

    def _of_other_noise(self) -> list[EntryInfo]:
        if self.wanted:
            entry = self._opened(self.wanted)
            near = [entry.info] if entry else []
        else:
            near = self.bank.recall(self.target.request, CANDIDATES)
        return [info for info in near if not self._same_noise(info)]

    def _opened(self, entry_id: str) -> Entry | None:
        entry = self.bank.open(entry_id)
        return None if entry is None or self.target.request.identity.difference(entry.info.identity) else entry

    def _same_noise(self, info: EntryInfo) -> bool:
        return same_noise(info.noise, self.target.request.profile.noise)

    def _unfit(self, sigmas: tuple[float, ...]) -> str | None:
        return schedules_differ(self.target.request.profile, sigmas)

    def _compared(self, entry: Entry) -> _Candidate | None:
        own, lent = self.target.signature.x0, entry.signature.get("x0")
        if lent is None or lent.shape != own.shape or not self._same_noise(entry.info):
            return None
        return _Candidate(entry, 1 - mean_agreement(own, lent, self.target.grid), self._unfit(entry.sigmas))

    def _judge(self, one: _Candidate) -> Choice | None:
        return self._told(one.entry, lambda: self._verdict(one))

    def _verdict(self, one: _Candidate) -> Choice:
        own, lent = self.target.signature, EarlySignature.from_tensors(one.entry.signature)
        evidence = gather(own, lent, self.target.grid, self.target.self_qk)
        verdict = judge(own, lent, evidence, self.policy)
        if verdict.decision == "joint" and one.unfit:
            verdict = replace(verdict, decision="miss", reason=one.unfit)
        return Choice(one.entry, verdict, evidence)

    def _judge_other(self, info: EntryInfo) -> Choice | None:
        entry = self._opened(info.id)
        if entry is None:
            return None
        own = self.target.signature
        return self._told(
            entry,
            lambda: Choice(entry, judge_other_noise(own, EarlySignature.from_tensors(entry.signature)), None),
        )

    def _told(self, entry: Entry, part: Callable[[], T]) -> T | None:
        """What comes of one donor; None, with a warning, of one whose parts do not fit this run."""
        try:
            return part()
        except ValueError as error:
            self.warn(f"donor {entry.id[:8]} was passed over: {error}")
            return None
