"""The plan of a run: the kind of every step, fixed before the steps it speaks of are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..gate.policy import Policy
from ..schedule import finish_steps, log_snr, probe_steps

# Computed steps lie a little earlier than evenly, as what goes wrong early is amplified. Since answers are corrected it
# hardly matters: on 21 pairs of the fit split under the balanced policy (18 of 50 computed), exponents 1, 1.1 and 1.25
# gave 59.9, 60.3 and 59.1 dB, the worst 46.6, 48.6 and 50.0 dB.
EARLY = 1.25
# Steps up to which regions pay: a region lies between a full step and an answer, and so few steps leave nothing else to
# choose from. Of eight, skipping brings more for the same cost (12 pairs of the fit split, large grid, the few-step
# companion: 48.0 dB at the cost of 5.0 forwards, 39.8 dB at 4.9 with regions).
SHORT = 5
PURE_NOISE = -4.0  # log SNR below which a prediction is the prompt's mean and hardly changes; the first level is -inf


@dataclass(frozen=True)
class Plan:
    """Steps by index; `skipped` ones are answered without a forward, `region` ones compute a part of the tokens, all
    others are the model's own."""

    sigmas: tuple[float, ...]  # of the steps, without the closing level
    skipped: frozenset[int]
    region: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if any(not 0 <= i < len(self.sigmas) for i in self.skipped | self.region):
            raise ValueError("a plan speaks of a step that the schedule does not have")
        if self.skipped & self.region:
            raise ValueError("a plan cannot skip a step and compute a region in it")

    @property
    def forwards(self) -> int:
        """How often the model is called, in full or in part."""
        return len(self.sigmas) - len(self.skipped)

    def kind(self, step: int) -> str:
        return "skipped" if step in self.skipped else "region" if step in self.region else "dense"

    def __str__(self) -> str:
        return "".join({"skipped": ".", "region": "o", "dense": "#"}[self.kind(i)] for i in range(len(self.sigmas)))

    def regional(self, refresh: int) -> Plan:
        """The same plan with regions: of the computed steps between two skipped ones every `refresh`-th stays full,
        the first of them too. 1 leaves the plan as it is."""
        if refresh < 1:
            raise ValueError(f"every how many computed steps is one full? at least 1, got {refresh}")
        if not self.skipped:
            return self
        between = [i for i in range(min(self.skipped), max(self.skipped)) if i not in self.skipped]
        return Plan(self.sigmas, self.skipped, frozenset(i for n, i in enumerate(between) if n % refresh))


def halved(plan: Plan, step: int) -> Plan:
    """The same plan with the middle of the skipped steps right after `step` computed; one alone stays skipped."""
    last = step
    while last + 1 in plan.skipped:
        last += 1
    if last - step < 2:
        return plan
    return Plan(plan.sigmas, plan.skipped - {step + 1 + (last - step) // 2}, plan.region)


def drawn_plan(sigmas: Sequence[float], kinds: str) -> Plan:
    """A plan step by step: d computed in full, r a region, s skipped. ValueError for anything else."""
    if len(kinds) != len(sigmas) or set(kinds) - set("drs"):
        raise ValueError(f"{kinds!r} is no plan of {len(sigmas)} steps; write d, r or s for each")
    chosen = {kind: frozenset(i for i, k in enumerate(kinds) if k == kind) for kind in "rs"}
    return Plan(tuple(sigmas), chosen["s"], chosen["r"])


def short_plan(sigmas: Sequence[float], regions: int, probe: int | None = None) -> Plan:
    """For few, far steps: none between the probe and the dense finish is full. `regions` in a row compute a region,
    then one is skipped."""
    first = probe_steps(len(sigmas)) if probe is None else probe
    between = range(first, len(sigmas) - finish_steps(len(sigmas)))
    skipped = frozenset(i for n, i in enumerate(between) if n % (regions + 1) == regions)
    return Plan(tuple(sigmas), skipped, frozenset(between) - skipped)


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


def even_plan(sigmas: Sequence[float], computed: int, probe: int | None = None, parametrisation: str = "flow") -> Plan:
    """`computed` steps between probe and dense finish, nearly evenly spaced in log signal-to-noise ratio; the others
    skipped.

    Steps of a shifted schedule are close together in the middle, where a prediction hardly changes from one to the
    next, and far apart at both ends.
    """
    first = probe_steps(len(sigmas)) if probe is None else probe
    last = len(sigmas) - finish_steps(len(sigmas))
    levels = [log_snr(sigma, parametrisation) for sigma in sigmas]
    start, stop, free = max(levels[first - 1], PURE_NOISE), levels[last], list(range(first, last))
    for k in range(1, min(computed, len(free)) + 1):
        wanted = start + (k / (computed + 1)) ** EARLY * (stop - start)
        free.remove(min(free, key=lambda i, w=wanted: abs(levels[i] - w)))
    return Plan(tuple(sigmas), frozenset(free))


def plan_of(
    policy: Policy, sigmas: Sequence[float], probe: int, parametrisation: str = "flow", regions: bool = True
) -> Plan:
    """What a policy makes of a hit. `regions`: whether regions can be computed."""
    if regions and policy.regions and len(sigmas) <= SHORT:
        return short_plan(sigmas, policy.regions, probe)
    return even_plan(sigmas, policy.computed(len(sigmas), probe), probe, parametrisation)
