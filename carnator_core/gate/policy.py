"""Policies: how much risk a person takes, and what an accepted risk allows."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """`threshold`: the largest accepted risk, on the gate's scale of [0, 1]. `depth`: most steps skipped in a row
    on a schedule of 50; shorter ones skip as much of their way. `tolerance`: how far an answer may be off before fewer
    steps are answered (`reuse.pace`)."""

    name: str
    threshold: float
    depth: int
    tolerance: float = math.inf


POLICIES = {
    policy.name: policy for policy in (Policy("safe", 0.3, 1), Policy("balanced", 0.55, 2), Policy("fast", 0.75, 3))
}
DEFAULT = "balanced"


def policy_named(name: str) -> Policy:
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is unknown; use one of {', '.join(POLICIES)}")
    return POLICIES[name]
