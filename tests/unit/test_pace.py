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
from carnator_core.reuse.plan import paced_plan

PROMPT = "one large red ball moving left over the sea, steady camera"
OTHER = PROMPT.replace("ball", "ring")


def kinds(pace: Pace, error) -> str:
    """A run's kinds when the answer at every full step is off by `error(step)`."""
    out = []
    for step in range(pace.steps):
        kind = pace.kind(step)
        out.append({"dense": "#", "skipped": ".", "region": "o"}[kind])
        if kind != "skipped" and step >= pace.probe:
            pace.computed(step, error(step) if kind == "dense" else None)
    return "".join(out)


@settings(derandomize=True, deadline=None)
@given(st.integers(4, 60), st.integers(1, 6))
def test_answers_that_hold_give_the_plan_of_that_depth(steps, depth):
    plan = paced_plan([1 - i / steps for i in range(steps)], depth)
    probe = max(1, round(0.08 * steps))
    assert kinds(Pace(steps, probe, depth, math.inf), lambda _: 1.0) == str(plan)
    assert kinds(Pace(steps, probe, depth, 0.1), lambda _: 0.001) == str(plan)


@settings(derandomize=True, deadline=None)
@given(st.integers(10, 60), st.integers(1, 6), st.floats(0.001, 1.0), st.integers(1, 4))
def test_probe_and_finish_are_full_and_never_more_than_the_depth_is_answered_in_a_row(steps, depth, error, refresh):
    pace = Pace(steps, 2, depth, 0.05, refresh)
    told = kinds(pace, lambda _: error)
    assert told.startswith("##") and set(told[pace.last :]) == {"#"}
    assert "." * (depth + 1) not in told


def test_answers_that_go_wrong_end_the_skipping_and_it_begins_again_when_they_hold():
    told = kinds(Pace(50, 4, 3, 0.05), lambda step: 0.5 if step < 20 else 0.01)
    assert told.startswith("####...###")
    assert set(told[8:20]) == {"#"} and told[22:40].count(".") >= 9


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
    told = [row.kind for row in narrow.steps]
    assert "skipped" not in told[told.index("skipped") + 6 :]  # found wanting at the first look
