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
    depth: float

    def computed(self, risk: float, steps: int, probe: int) -> int:
        """How many of the steps between probe and dense finish are computed in a hit.

        By risk: from one for each `depth` skipped ones near risk 0 to one for each skipped one near the threshold.
        """
        deepest = max(1.0, self.depth * steps / REFERENCE_STEPS)
        depth = 1 + max(0.0, 1 - risk / self.threshold) * (deepest - 1)
        return max(0, round((steps - probe - finish_steps(steps)) / (depth + 1)))


# Thresholds part one changed word from a new scene, as far as that can be: on the fit split the middle half of one-word
# pairs has a risk of 0.08 to 0.42 (small grid; 0.03 to 0.13 large), of new scenes 0.49 to 0.67 (0.35 to 0.54). Depths
# are cautious, as an answer's cost grows fast: 62, 54 and 46 dB to the own dense clip at 1, 2 and 3 (fit, small grid).
POLICIES = {
    policy.name: policy for policy in (Policy("safe", 0.2, 1), Policy("balanced", 0.35, 1.5), Policy("fast", 0.6, 2))
}
DEFAULT = "balanced"


def policy_named(name: str) -> Policy:
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is unknown; use one of {', '.join(POLICIES)}")
    return POLICIES[name]
