from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from carnator_core import schedule


@given(st.sampled_from(["flow", "epsilon", "v"]), st.floats(0.05, 0.95))
def test_an_answer_in_x0_round_trips_through_the_models_output(parametrisation, sigma):
    x, x0 = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    output = schedule.from_x0(parametrisation, x, x0, sigma)
    torch.testing.assert_close(schedule.to_x0(parametrisation, x, output, sigma), x0)


@pytest.mark.parametrize("parametrisation", ["flow", "epsilon", "v"])
def test_a_perfect_output_gives_the_clean_latent(parametrisation):
    clean, noise, s = torch.randn(50).double(), torch.randn(50).double(), 0.6
    x, output = {
        "flow": ((1 - s) * clean + s * noise, noise - clean),
        "epsilon": (clean + s * noise, noise),
        "v": (0.8 * clean + s * noise, 0.8 * noise - s * clean),
    }[parametrisation]
    torch.testing.assert_close(schedule.to_x0(parametrisation, x, output, s), clean)


def test_steps_are_found_by_sigma_also_between_levels():
    levels = [1.0, 0.8, 0.5, 0.2, 0.0]
    assert [schedule.step_of(s, levels) for s in levels] == [0, 1, 2, 3, 4]
    assert schedule.step_of(0.65, levels) == 1
    assert schedule.step_of(0.8 - 1e-7, levels) == 1
    assert schedule.step_of(1.3, levels) == 0
    assert schedule.is_level(0.5 + 1e-7, levels) and not schedule.is_level(0.65, levels)


def test_a_probe_is_a_share_of_the_schedule_and_never_empty():
    assert [schedule.probe_steps(n) for n in (1, 4, 25, 50)] == [1, 1, 2, 4]
    with pytest.raises(ValueError):
        schedule.probe_steps(0)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12, unique=True), st.floats(-0.2, 1.2))
def test_interpolation_over_sigma_is_linear_and_clamped(levels, sigma):
    levels = sorted(levels, reverse=True)
    i, j, w = schedule.bracket(sigma, levels)
    value = (1 - w) * levels[i] + w * levels[j]
    assert value == pytest.approx(min(max(sigma, levels[-1]), levels[0]), abs=1e-6)
