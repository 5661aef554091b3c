"""Gate, version 1: conservative. Every discrepancy is named; the largest one, on a common scale, is the risk.

The scale of a discrepancy is its value at which reuse was seen to stop paying (`SCALES`). Nothing is certified yet, and
the report says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..request import Profile
from ..signature.early import EarlySignature
from ..signature.evidence import Evidence
from .policy import Policy

SCALES = {  # a discrepancy of this size is a risk of 1
    "words": 1.0,  # share of rows without a counterpart
    "scene": 1.5,  # root mean square x0 difference over the whole grid, in deviations of x0
    "region": 1.0,  # share of the grid that differs
    "guidance": 1.0,  # 1 - correlation of where the prompt acts
}
CERTIFICATE = "not certified"


@dataclass(frozen=True)
class Verdict:
    """What one donor may lend."""

    decision: str  # joint, connectivity or miss
    reason: str
    risk: float
    discrepancies: dict[str, float] = field(default_factory=dict)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Pearson correlation of two fields of one shape; 0 when one of them is flat."""
    a, b = a.float().flatten() - a.float().mean(), b.float().flatten() - b.float().mean()
    size = a.norm() * b.norm()
    return float(a @ b / size) if size > 0 else 0.0


def discrepancies(target: EarlySignature, donor: EarlySignature, evidence: Evidence) -> dict[str, float]:
    """Named values, each at least 0; larger is more different."""
    rows = len(target.conditioning) + len(donor.conditioning)
    found = {
        "words": (len(evidence.words.target) + len(evidence.words.donor)) / rows,
        "scene": evidence.difference.pow(2).mean().sqrt().item(),
        "region": evidence.share,
    }
    if target.guidance is not None and donor.guidance is not None:
        found["guidance"] = 1 - correlation(target.guidance.cpu(), donor.guidance.cpu())
    return found


def risk_of(found: dict[str, float]) -> float:
    """The largest discrepancy on the common scale, clamped to [0, 1]."""
    return min(1.0, max(value / SCALES[name] for name, value in found.items()))


def schedules_differ(target: Profile, sigmas: Sequence[float]) -> str | None:
    """Why a trajectory stored at `sigmas` cannot answer this schedule; None when it can."""
    first = target.sigmas[0]
    if abs(sigmas[0] - first) > 0.02 * first:
        return f"its trajectory begins at noise level {sigmas[0]:.3f} and this run at {first:.3f}"
    return None


def judge(
    target: EarlySignature,
    donor: EarlySignature,
    evidence: Evidence,
    same_noise: bool,
    policy: Policy,
    has_connectivity: bool = False,
) -> Verdict:
    """Grade one donor: joint with the same noise and a small risk; connectivity with other noise; else miss."""
    found = discrepancies(target, donor, evidence)
    if not same_noise:
        return _other_noise(found, policy, has_connectivity)
    risk = risk_of(found)
    found = {name: round(value, 4) for name, value in found.items()}
    if risk > policy.threshold:
        worst = max(found, key=lambda name: found[name] / SCALES[name])
        return Verdict("miss", f"the nearest donor differs too much ({worst} {found[worst]:.2f})", risk, found)
    return Verdict("joint", _in_words(evidence), risk, found)


def _other_noise(found: dict[str, float], policy: Policy, has_connectivity: bool) -> Verdict:
    """With other noise predictions never agree; only the words can tell whether attention is alike."""
    words = {"words": round(found["words"], 4)}
    risk = risk_of(words)
    if risk <= policy.threshold and has_connectivity:
        return Verdict("connectivity", "a donor with another seed lends where attention looks", risk, words)
    reason = "the nearest donor has another seed; keep its seed to reuse its computation"
    return Verdict("miss", reason, risk, words)


def _in_words(evidence: Evidence) -> str:
    if evidence.words.same:
        return "the same words, or words that mean the same"
    count = max(len(evidence.words.target), len(evidence.words.donor))
    where = "everywhere" if evidence.is_global else f"in {evidence.share:.0%} of the clip"
    return f"{count} text token{'s' if count > 1 else ''} changed, seen {where}"
