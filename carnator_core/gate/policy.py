"""Policies: how much risk a person takes, and what an accepted risk allows."""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule import finish_steps

REFERENCE_STEPS = 50  # a policy's depth is told for a schedule of this length: what counts is the way skipped at once


@dataclass(frozen=True)
class Policy:
    """What a person accepts.

    `threshold`: the largest accepted risk, on the gate's scale of [0, 1]. `depth`: steps skipped for each computed one
    on a schedule of 50; shorter ones skip as much of their way.
    """

    name: str
    threshold: float
    depth: int

    def computed(self, risk: float, steps: int, probe: int) -> int:
        """How many of the steps between probe and dense finish are computed in a hit.

        By risk: from one for each `depth` skipped ones near risk 0 to one for each skipped one near the threshold.
        """
        depth = max(1, round(self.depth * steps / REFERENCE_STEPS))
        depth = max(1, min(depth, 1 + int((1 - risk / self.threshold) * depth)))
        return max(0, round((steps - probe - finish_steps(steps)) / (depth + 1)))


POLICIES = {
    policy.name: policy for policy in (Policy("safe", 0.3, 1), Policy("balanced", 0.55, 2), Policy("fast", 0.75, 3))
}
DEFAULT = "balanced"


def policy_named(name: str) -> Policy:
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is unknown; use one of {', '.join(POLICIES)}")
    return POLICIES[name]
