"""Gate, version 1: every discrepancy is named; one of them is the risk.

What a donor can lend is bounded by how far its x0 prediction agrees with the target's at the end of the probe: where
they disagree nothing is taken from it. So the risk is the disagreement, 1 less the mean trust over the clip. The other
discrepancies are told, not judged. Nothing is certified yet, and the report says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..request import Profile
from ..signature.alignment import Alignment, align
from ..signature.early import EarlySignature
from ..signature.evidence import Evidence
from .policy import Policy

FINE = 0.9  # least number of stored levels, as a share of the target's steps


@dataclass(frozen=True)
class Verdict:
    """What one donor may lend."""

    decision: str  # joint or miss
    reason: str
    risk: float
    discrepancies: dict[str, float] = field(default_factory=dict)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Pearson correlation of two fields of one shape; 0 when one of them is flat."""
    a, b = a.float().flatten() - a.float().mean(), b.float().flatten() - b.float().mean()
    size = a.norm() * b.norm()
    return float(a @ b / size) if size > 0 else 0.0


def changed_words(target: EarlySignature, donor: EarlySignature, words: Alignment) -> float:
    """Share of both prompts' text rows that have no counterpart, in [0, 1]."""
    return (len(words.target) + len(words.donor)) / (len(target.conditioning) + len(donor.conditioning))


def discrepancies(target: EarlySignature, donor: EarlySignature, evidence: Evidence) -> dict[str, float]:
    """Named values, each at least 0; larger is more different."""
    found = {
        "disagreement": 1 - evidence.agreement,
        "words": changed_words(target, donor, evidence.words),
        "scene": evidence.difference.pow(2).mean().sqrt().item(),
        "region": evidence.share,
    }
    if target.guidance is not None and donor.guidance is not None:
        found["guidance"] = 1 - correlation(target.guidance.cpu(), donor.guidance.cpu())
    return found


def schedules_differ(target: Profile, sigmas: Sequence[float]) -> str | None:
    """Why a trajectory stored at `sigmas` cannot answer this schedule; None when it can.

    A course that is interpolated between far levels answers worse than no donor at all (seen with 24 levels for 50
    steps), so it must be stored about as finely as the target steps.
    """
    first, steps = target.sigmas[0], len(target.sigmas) - 1
    if abs(sigmas[0] - first) > 0.02 * first:
        return f"the nearest donor begins at noise level {sigmas[0]:.3f} and this run at {first:.3f}"
    if len(sigmas) < FINE * steps:
        return f"the nearest donor keeps predictions at {len(sigmas)} noise levels, too few to answer {steps} steps"
    return None


def judge(target: EarlySignature, donor: EarlySignature, evidence: Evidence, policy: Policy) -> Verdict:
    """Grade one donor that began with the same noise: joint with a small risk, else miss."""
    found = {name: round(value, 4) for name, value in discrepancies(target, donor, evidence).items()}
    risk = found["disagreement"]
    if risk > policy.threshold:
        reason = f"the nearest donor shows another clip: the probes agree to {1 - risk:.0%}"
        return Verdict("miss", reason, risk, found)
    return Verdict("joint", _in_words(evidence), risk, found)


def judge_other_noise(target: EarlySignature, donor: EarlySignature) -> Verdict:
    """The verdict on a donor that began with other noise: predictions never agree then, so only the words are told,
    and the remedy. ValueError for conditionings of different encoders."""
    words = round(changed_words(target, donor, align(target.conditioning, donor.conditioning)), 4)
    reason = "the nearest donor began with other noise (another seed); keep its seed to reuse its computation"
    return Verdict("miss", reason, words, {"words": words})


def _in_words(evidence: Evidence) -> str:
    if evidence.words.same:
        return "the same words, or words that mean the same"
    count = max(len(evidence.words.target), len(evidence.words.donor))
    where = "everywhere" if evidence.is_global else f"in {evidence.share:.0%} of the clip"
    return f"{count} text token{'s' if count > 1 else ''} changed, seen {where}"
