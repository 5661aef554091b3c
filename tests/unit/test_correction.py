from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from carnator_core.reuse.answer import ForecastAnswer
from carnator_core.reuse.correction import CorrectedAnswer
from carnator_core.reuse.plan import Plan, paced_plan

SHAPE = (1, 1, 1, 1, 3)


def course(sigma: float) -> torch.Tensor:
    """A curved course of predictions, whatever the noisy latent is."""
    return torch.tensor([sigma**2, 3 * sigma**3 - sigma, 1.0]).reshape(SHAPE)


def levels(top: float, steps: int) -> list[float]:
    return [top * (1 - i / steps) for i in range(steps)]


def euler(plan: Plan, answerer) -> torch.Tensor:
    """What a host's sampler makes of the computed and the answered predictions."""
    x, sigmas = torch.zeros(SHAPE), [*plan.sigmas, 0.5 * plan.sigmas[-1]]
    for i, sigma in enumerate(plan.sigmas):
        if plan.kind(i) == "skipped":
            x0 = answerer.answer(sigma)
        else:
            x0 = course(sigma)
            answerer.observe(sigma, x0)
        x = x0 + (sigmas[i + 1] / sigma) * (x - x0)
    return x


class ToldAgain:
    """Answers that were known in time: in all stretches but the last, the forecast knows the prediction behind them."""

    def __init__(self, plan: Plan):
        self.plan, self.forecast, self.seen = plan, ForecastAnswer(), []

    def observe(self, sigma: float, x0: torch.Tensor) -> None:
        self.forecast.observe(sigma, x0)
        self.seen.append((sigma, x0))

    def answer(self, sigma: float) -> torch.Tensor:
        computed = [s for i, s in enumerate(self.plan.sigmas) if self.plan.kind(i) != "skipped" and s < sigma]
        last_stretch = all(self.plan.kind(i) != "skipped" for i, s in enumerate(self.plan.sigmas) if s < computed[0])
        if last_stretch:
            return self.forecast.answer(sigma)
        known = ForecastAnswer()
        for seen in [*self.seen, (computed[0], course(computed[0]))]:
            known.observe(*seen)
        return known.answer(sigma)


@given(st.integers(8, 40), st.integers(1, 5), st.sampled_from([("flow", 1.0), ("flow", 0.7), ("epsilon", 14.0)]))
def test_the_noisy_latent_ends_where_answers_known_in_time_would_have_led_it(steps, run, kind):
    parametrisation, top = kind
    plan = paced_plan(levels(top, steps), run)
    corrected = euler(plan, CorrectedAnswer(ForecastAnswer(), plan, parametrisation))
    torch.testing.assert_close(corrected, euler(plan, ToldAgain(plan)), atol=1e-4, rtol=1e-4)


def test_a_curved_course_is_followed_much_better_than_by_forecasts_alone():
    plan = Plan(tuple(levels(1.0, 20)), frozenset({3, 4, 5, 6, 8, 9, 10, 11, 13}))
    truth = euler(Plan(plan.sigmas, frozenset()), ForecastAnswer())
    plain, corrected = euler(plan, ForecastAnswer()), euler(plan, CorrectedAnswer(ForecastAnswer(), plan))
    assert (corrected - truth).norm() < 0.25 * (plain - truth).norm()


def test_the_error_that_is_told_is_that_of_the_worst_stretch():
    plan = Plan(tuple(levels(1.0, 8)), frozenset({2, 4, 6}))
    answerer = CorrectedAnswer(ForecastAnswer(), plan)
    assert answerer.error is None
    x0 = torch.tensor([-1.0, 0.0, 1.0]).reshape(SHAPE)
    for i, sigma in enumerate(plan.sigmas):
        if plan.kind(i) == "skipped":
            answerer.answer(sigma)
        else:
            answerer.observe(sigma, x0 + (0.2 if i >= 5 else 0.0))  # a jump that no forecast can know
    assert answerer.error == pytest.approx(0.1, rel=0.01)  # half way on a line


def test_a_debt_waits_over_computed_steps_until_steps_are_skipped_again():
    sigmas = tuple(levels(1.0, 12))
    for second in ({6, 7}, {8, 9}):
        first = Plan(sigmas, frozenset({3, 4}))
        unpaid = euler(first, CorrectedAnswer(ForecastAnswer(), first))
        assert torch.equal(unpaid, euler(first, ForecastAnswer()))
        plan = Plan(sigmas, first.skipped | second)
        paid = euler(plan, CorrectedAnswer(ForecastAnswer(), plan)) - euler(plan, ForecastAnswer())
        known = euler(first, ToldAgain(Plan(sigmas, first.skipped | {10}))) - unpaid
        torch.testing.assert_close(paid, known, atol=1e-6, rtol=1e-3)


def test_answers_that_were_right_owe_nothing():
    plan = paced_plan(levels(1.0, 20), 2)

    class Right:
        def observe(self, sigma, x0): ...

        def answer(self, sigma):
            return course(sigma)

    answerer = CorrectedAnswer(Right(), plan)
    for i, sigma in enumerate(plan.sigmas):
        if plan.kind(i) == "skipped":
            assert torch.equal(answerer.answer(sigma), course(sigma))
        else:
            answerer.observe(sigma, course(sigma))


@pytest.mark.parametrize("skipped", [{2, 3}, {1, 3}, {2, 3, 4}])
def test_levels_that_stand_still_and_plans_that_skip_to_the_end_give_finite_answers(skipped):
    plan = Plan((1.0, 0.5, 0.5, 0.5, 0.5), frozenset(skipped))
    answerer = CorrectedAnswer(ForecastAnswer(), plan)
    for i, sigma in enumerate(plan.sigmas):
        if plan.kind(i) == "skipped":
            assert answerer.answer(sigma).isfinite().all()
        else:
            answerer.observe(sigma if i == 0 else sigma - 1e-3 * i, course(sigma))
