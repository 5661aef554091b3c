from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from carnator_core.evaluation import methods, traces
from carnator_core.evaluation.walk import Prompted, walk
from carnator_core.grid import TokenGrid
from carnator_core.mini import model as mini
from carnator_core.mini import sample
from carnator_core.reuse.answer import DonorAnswer, ForecastAnswer, FrozenAnswer
from carnator_core.reuse.plan import Plan, dense_plan, even_plan, halved, paced_plan, resume_plan
from carnator_core.reuse.trajectory import Trajectory

SHAPE = (1, 16, 2, 8, 8)
GRID = TokenGrid.of_latent(SHAPE)
LEVELS = sample.sigmas(12)[:-1].tolist()


def trajectory(seed: int = 0) -> Trajectory:
    return Trajectory(LEVELS, torch.randn(len(LEVELS), *SHAPE, generator=torch.Generator().manual_seed(seed)))


def test_a_donor_equal_to_the_target_is_followed_exactly():
    donor = trajectory()
    answerer = DonorAnswer(donor, GRID)
    answerer.observe(LEVELS[2], donor.at(LEVELS[2]))
    for sigma in LEVELS[3:]:
        torch.testing.assert_close(answerer.answer(sigma), donor.at(sigma), atol=1e-5, rtol=1e-5)


def test_where_target_and_donor_disagree_the_target_is_held():
    donor = trajectory()
    own = donor.at(LEVELS[2]).clone()
    own[..., :4] += 6.0  # the left half of the frame shows something else
    answerer = DonorAnswer(donor, GRID)
    answerer.observe(LEVELS[2], own)
    answer = answerer.answer(LEVELS[8])
    torch.testing.assert_close(answer[..., :2], own[..., :2], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(answer[..., 6:], donor.at(LEVELS[8])[..., 6:], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("answerer", [DonorAnswer(trajectory(), GRID), FrozenAnswer(), ForecastAnswer()])
def test_an_answer_before_any_dense_step_is_refused(answerer):
    with pytest.raises(RuntimeError, match="probe"):
        answerer.answer(0.5)


def test_a_forecast_extends_a_linear_course():
    forecast = ForecastAnswer()
    for sigma in (0.9, 0.8):
        forecast.observe(sigma, torch.full(SHAPE, sigma))
    torch.testing.assert_close(forecast.answer(0.6), torch.full(SHAPE, 0.6))


@given(st.floats(0.0, 1.0))
def test_a_trajectory_lies_between_its_neighbours(sigma):
    line = Trajectory([0.9, 0.5, 0.1], torch.tensor([0.9, 0.5, 0.1]).view(3, 1))
    assert line.at(sigma).item() == pytest.approx(min(max(sigma, 0.1), 0.9), abs=1e-5)


def test_a_trajectory_refuses_levels_that_do_not_descend():
    with pytest.raises(ValueError, match="descend"):
        Trajectory([0.5, 0.5], torch.zeros(2, 1))


@given(st.integers(1, 60), st.integers(0, 5))
def test_every_plan_keeps_the_probe_and_the_finish_dense(steps, run):
    plan = paced_plan([1 - i / steps for i in range(steps)], run)
    assert plan.kind(0) == "dense" and plan.kind(steps - 1) == "dense"
    longest = max(len(part) for part in str(plan).split("#"))
    assert longest <= run


def test_plans_print_and_count_and_refuse_steps_that_do_not_exist():
    shifted = [3 * u / (1 + 2 * u) for u in (1 - i / 50 for i in range(50))]
    assert str(even_plan(shifted, 10)) == "######..#...#....#.....#......#.....#....#...#.###"
    assert str(even_plan(shifted, 99)) == "#" * 50 and even_plan(shifted, 0).forwards == 7
    assert str(resume_plan([1.0] * 50, 25)) == "####" + "." * 21 + "#" * 25
    assert resume_plan([1.0] * 50, 25).forwards == 29
    with pytest.raises(ValueError):
        Plan((1.0,), frozenset({1}))


@given(st.sets(st.integers(1, 18)), st.integers(0, 18))
def test_halving_computes_one_step_more_in_the_next_stretch_and_nothing_else(skipped, step):
    plan = Plan(tuple(1 - i / 20 for i in range(20)), frozenset(skipped))
    found, stretch = halved(plan, step), []
    while step + 1 + len(stretch) in skipped:
        stretch.append(step + 1 + len(stretch))
    (added,) = (plan.skipped - found.skipped) or {None}
    if len(stretch) < 2:
        assert found == plan
    else:
        assert added in stretch and abs(2 * added - stretch[0] - stretch[-1]) <= 1 and found.skipped < plan.skipped


def test_a_dense_plan_is_the_plain_sampler_bit_for_bit():
    model, prompt = mini.load(), "one small red ball moving left over the sea, steady camera"
    plain = sample.sample(model, [prompt], [5], size=16, steps=4)
    plan = dense_plan(sample.sigmas(4)[:-1].tolist())
    walked = walk(Prompted(model, [prompt]), sample.noise([5], 16), plan, FrozenAnswer())
    assert torch.equal(plain, walked)


def test_a_request_that_borrows_from_itself_ends_where_the_dense_one_does():
    model = mini.load()
    pair = traces.pairs("fit", "same", 1)[0]
    plan = paced_plan(sample.sigmas(8)[:-1].tolist(), 1)
    case = methods.Case.of(model, [pair], 16, plan)
    computed = []
    truth = walk(
        case.wanted, case.noise, dense_plan(plan.sigmas), FrozenAnswer(), lambda _, __, x0: computed.append(x0)
    )
    exact = replace(case, donor_x0=torch.stack(computed))
    torch.testing.assert_close(methods.carnator(exact), truth, atol=1e-4, rtol=1e-4)
    assert not torch.equal(case.donor_x0, exact.donor_x0)  # as a bank lends: rounded
    torch.testing.assert_close(methods.carnator(case), truth, atol=0.03, rtol=0)
    assert not torch.allclose(methods.own_frozen(case), truth, atol=1e-2)
