"""The pace of a hit: fewer steps are answered where answers go wrong, more where they hold."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from carnator_core.bank import Bank
from carnator_core.gate.policy import Policy
from carnator_core.pipelines import Generator
from carnator_core.reuse.pace import Pace, off_by
from carnator_core.reuse.plan import even_plan

PROMPT = "one large red ball moving left over the sea, steady camera"
OTHER = PROMPT.replace("ball", "ring")


def levels(steps: int) -> list[float]:
    """A shifted schedule, as Wan's samplers use it."""
    return [3 * u / (1 + 2 * u) for u in (1 - i / steps for i in range(steps))]


def kinds(pace: Pace, error) -> str:
    """A run's kinds when the answer at every full step is off by `error(step)`."""
    out = []
    for step in range(len(pace.sigmas)):
        kind = pace.kind(step)
        out.append({"dense": "#", "skipped": ".", "region": "o"}[kind])
        if kind != "skipped" and step >= pace.probe:
            pace.took(step, error(step) if kind == "dense" else None)
    return "".join(out)


@settings(derandomize=True, deadline=None)
@given(st.integers(8, 60), st.integers(0, 20))
def test_answers_that_hold_give_about_the_even_plan(steps, computed):
    sigmas, probe = levels(steps), max(1, round(0.08 * steps))
    computed = min(computed, steps // 3)
    plan = even_plan(sigmas, computed, probe)
    for tolerance, error in ((math.inf, 1.0), (0.1, 0.001)):
        told = kinds(Pace(sigmas, probe, computed, tolerance), lambda _, e=error: e)
        assert abs(told.count(".") - len(plan.skipped)) <= 1 + computed // 4


@settings(derandomize=True, deadline=None)
@given(st.integers(10, 60), st.integers(1, 20), st.floats(0.001, 1.0), st.integers(1, 4))
def test_probe_and_finish_are_full_and_no_way_is_longer_than_planned(steps, computed, error, refresh):
    sigmas = levels(steps)
    pace = Pace(sigmas, 2, computed, 0.05, refresh)
    told = kinds(pace, lambda _: error)
    assert told.startswith("##") and set(told[pace.last :]) == {"#"}
    assert told.count(".") <= pace.last - 2
    looser = kinds(Pace(sigmas, 2, computed, 0.1, refresh), lambda _: error)
    assert looser.count(".") >= told.count(".") - 1


def test_answers_that_go_wrong_end_the_skipping_and_it_begins_again_when_they_hold():
    told = kinds(Pace(levels(50), 4, 10, 0.05), lambda step: 0.9 if step < 20 else 0.01)
    assert set(told[8:20]) == {"#"} and told[20:47].count(".") >= 12


def test_a_schedule_in_other_units_is_paced_as_well():
    """Variance-exploding levels, far above 1."""
    sigmas = [80 * (0.02 / 80) ** (i / 30) for i in range(30)]
    told = kinds(Pace(sigmas, 3, 8, math.inf, parametrisation="epsilon"), lambda _: 1.0)
    assert told.startswith("###") and 14 <= told.count(".") <= 18


def test_an_error_is_told_in_deviations():
    truth = torch.randn(1, 4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    assert off_by(truth, truth) == 0
    assert abs(off_by(truth + truth.std(), truth) - 1) < 1e-5


def test_a_run_that_tolerates_little_computes_more(tmp_path):
    make = Generator(Bank(tmp_path))
    make.policy = Policy("wide", 1e9, 6)
    make(PROMPT, 3, 32, 16)
    wide = make(OTHER, 3, 32, 16, refresh=1).report
    make.policy = Policy("narrow", 1e9, 6, 1e-4)
    narrow = make(OTHER, 3, 32, 16, refresh=1).report
    assert wide.decision == narrow.decision == "joint"
    assert wide.forwards < narrow.forwards
    assert narrow.forwards >= 15  # found wanting at the first look
