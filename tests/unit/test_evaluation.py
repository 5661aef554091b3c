"""The harness: what it draws, what it measures, and that an interrupted run goes on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from carnator_core.bank import Bank
from carnator_core.evaluation import bench, traces
from carnator_core.evaluation.methods import ABLATIONS, METHODS, Case
from carnator_core.evaluation.metrics import PSNR_CEILING, interval, psnr_each
from carnator_core.gate.policy import Policy
from carnator_core.mini import model as mini
from carnator_core.mini import sample
from carnator_core.mini.seeds import RANGES
from carnator_core.pipelines import Generator
from carnator_core.reuse.plan import paced_plan, resume_plan

STEPS = 8


@pytest.mark.parametrize("kind", traces.KINDS)
def test_pairs_are_what_their_kind_says_and_held_out(kind):
    for pair in traces.pairs("proof", kind, 20):
        assert pair.target.split == "proof" and pair.seed in RANGES["proof"]
        assert (pair.seed == pair.donor_seed) == (kind != "seed-only")
        wanted = {"one-word": {1}, "several-words": {2, 3}, "new-scene": set(range(8))}.get(kind, {0})
        assert len(pair.changed) in wanted
        assert (pair.prompt == pair.donor_prompt) == (pair.changed == () and kind != "paraphrase")


def test_pairs_are_the_same_each_time_and_other_with_another_seed():
    assert traces.pairs("fit", "one-word", 5, 1) == traces.pairs("fit", "one-word", 5, 1)
    assert traces.pairs("fit", "one-word", 5, 1) != traces.pairs("fit", "one-word", 5, 2)
    with pytest.raises(ValueError, match="one-word"):
        traces.pairs("fit", "two-words", 1)


def test_a_session_repeats_requests_exactly_where_it_says_same():
    asks = traces.session("calibrate", 60)
    for before, after in zip(asks, asks[1:], strict=False):
        equal = (before.prompt, before.seed) == (after.prompt, after.seed)
        assert equal == (after.kind == "same")


def test_intervals_hold_the_mean_and_shrink_to_a_point_for_equal_values():
    mean, low, high = interval([0.0, 1.0] * 50)
    assert low < mean == 0.5 < high
    assert interval([0.7] * 9) == pytest.approx((0.7, 0.7, 0.7))
    with pytest.raises(ValueError):
        interval([])


def test_psnr_of_equal_clips_is_finite_and_of_known_error_exact():
    truth = torch.zeros(2, 3)
    found = torch.stack((torch.zeros(3), torch.full((3,), 0.1)))
    assert psnr_each(found, truth, 1.0) == pytest.approx([PSNR_CEILING, 20.0], abs=1e-4)


def test_the_engine_with_a_forced_plan_is_the_method_that_the_harness_measures(tmp_path):
    """What is measured is what users get: same donor, same plan, same clip (up to the bank's 16 bits)."""
    pair = traces.pairs("fit", "one-word", 1)[0]
    plan = paced_plan(sample.sigmas(STEPS)[:-1].tolist(), 1)
    case = Case.of(mini.load(), [pair], 32, plan)
    maker = Generator(Bank(tmp_path))
    maker.policy = Policy("generous", 1.1, 3, 9.0)
    maker(pair.donor_prompt, seed=pair.seed, size=32, steps=STEPS)
    clip = maker(pair.prompt, seed=pair.seed, size=32, steps=STEPS, forced=plan)
    assert clip.report.decision == "joint"
    assert psnr_each(clip.latent, METHODS["carnator"](case), bench.PEAK)[0] > 50


def options(tmp_path, *more: str) -> list[str]:
    return ["--pairs", "2", "--steps", str(STEPS), "--split", "fit", "--out", str(tmp_path), "--json", *more]


def test_the_command_measures_resumes_and_tabulates(tmp_path, capsys):
    assert bench.main(options(tmp_path, "--plan", "paced-1", "resume-4")) == 0
    result = json.loads(capsys.readouterr().out)
    by_name = {(line["plan"], line["method"]): line for line in result["table"]}
    assert set(by_name) == {(p, m) for p in ("paced-1", "resume-4") for m in METHODS}
    for (plan, method), line in by_name.items():
        assert line["pairs"] == 2 and line["faithfulness"][1] <= line["faithfulness"][0] <= line["faithfulness"][2]
        assert line["forwards"] == (STEPS if method == "dense" else result["plans"][plan].count("#"))
    assert by_name["paced-1", "dense"]["psnr"][0] == PSNR_CEILING
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert bench.main(options(tmp_path, "--plan", "paced-1", "resume-4")) == 0
    assert json.loads(capsys.readouterr().out) == result
    assert (tmp_path / "rows.jsonl").read_text().splitlines() == rows


def test_a_bad_plan_ends_with_a_clear_message(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(options(tmp_path, "--plan", "resume-99"))
    assert ended.value.code == 2 and "resume-K" in capsys.readouterr().err


def test_a_donor_followed_everywhere_gives_its_own_clip_and_one_that_is_not_trusted_does_not():
    """Of the very same request, so that its course is the truth."""
    asked = traces.pairs("fit", "one-word", 1, seed=4)[0]
    pair = replace(asked, donor=asked.target, prompt=asked.donor_prompt)
    case = Case.of(mini.load(), [pair], 32, resume_plan(sample.sigmas(STEPS)[:-1].tolist(), 6))
    truth, _ = case.truth()
    near = {name: psnr_each(method(case), truth, bench.PEAK)[0] for name, method in ABLATIONS.items()}
    assert near["trust-all"] > near["trust-none"] + 10


def test_a_case_keeps_its_pairs_apart():
    """A batch of two gives each pair what it gets alone."""
    both = traces.pairs("fit", "one-word", 2, seed=3)
    plan = paced_plan(sample.sigmas(4)[:-1].tolist(), 1)
    model = mini.load()
    together = METHODS["carnator"](Case.of(model, both, 16, plan))
    for i, pair in enumerate(both):
        alone = METHODS["carnator"](Case.of(model, [pair], 16, plan))
        torch.testing.assert_close(together[i : i + 1], alone, atol=2e-4, rtol=1e-3)
