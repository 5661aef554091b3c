"""Policies: how much risk a person takes, and what an accepted risk allows."""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule import finish_steps

REFERENCE_STEPS = 50  # a policy's depth is told for a schedule of this length: what counts is the way skipped at once


@dataclass(frozen=True)
class Policy:
    """What a person accepts.

    `threshold`: the largest accepted risk, on the gate's scale of [0, 1]. `depth`: steps skipped for each computed one
    on a schedule of 50; shorter ones skip as much of their way. `tolerance`: the largest error of the answers, as the
    run itself measures it (`RunReport.answer_error`), at which it goes on skipping as planned; beyond it more is
    computed. `regions`: on a schedule of few steps, how many compute a region in a row before one is skipped; 0 for
    full steps alone.
    """

    name: str
    threshold: float
    depth: float
    tolerance: float
    regions: int = 0

    def computed(self, steps: int, probe: int) -> int:
        """How many of the steps between probe and dense finish a hit computes, if its answers keep the tolerance."""
        depth = max(1.0, self.depth * steps / REFERENCE_STEPS)
        return max(0, round((steps - probe - finish_steps(steps)) / (depth + 1)))


# Thresholds part one changed word from a new scene, as far as that can be: on the fit split the middle half of one-word
# pairs has a risk of 0.08 to 0.42 (small grid; 0.03 to 0.13 large), of new scenes 0.49 to 0.67 (0.35 to 0.54). How near
# a hit comes to its own full run hardly follows from the risk (`bench reuse --split fit --seed 3 --pairs 16 --plan
# even-10`: 58 dB at a risk of 0.70, 28 dB at one of 0.26) but from the measured error of its answers.
POLICIES = {
    policy.name: policy
    for policy in (
        Policy("safe", 0.2, 2, 0.05),
        Policy("balanced", 0.35, 3, 0.08, regions=2),
        Policy("fast", 0.6, 4, 0.12, regions=1),
    )
}
DEFAULT = "balanced"


def policy_named(name: str) -> Policy:
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is unknown; use one of {', '.join(POLICIES)}")
    return POLICIES[name]
