"""The engine on the embedded model: every promise that a host relies on."""

from __future__ import annotations

import math

import pytest
import torch

from carnator_core.attention.connectivity import Connectivity
from carnator_core.bank import Bank
from carnator_core.gate.policy import Policy, policy_named
from carnator_core.mini import sample
from carnator_core.pipelines import Generator
from carnator_core.reuse.engine import KEEP_BYTES, KEEP_LEAST, Run, kept_levels
from carnator_core.reuse.plan import even_plan, paced_plan

PROMPT = "one large red ball moving left over the forest, steady camera"
OTHER = PROMPT.replace("ball", "cross")
GENEROUS = Policy("generous", 1.1, 3, 9.0)  # judges nothing away, so the path behind the gate is what is tested
STEPS = 12


@pytest.fixture
def bank(tmp_path) -> Bank:
    return Bank(tmp_path / "bank")


def generator(bank: Bank, policy: Policy = GENEROUS) -> Generator:
    out = Generator(bank)
    out.policy = policy
    return out


def make(generator: Generator, prompt: str = PROMPT, seed: int = 1, **kwargs):
    return generator(prompt, seed=seed, size=32, steps=kwargs.pop("steps", STEPS), **kwargs)


def plain(generator: Generator, prompt: str = PROMPT, seed: int = 1, steps: int = STEPS) -> torch.Tensor:
    return sample.sample(generator.model, [prompt], [seed], 32, steps)


def test_a_miss_and_a_bank_that_is_off_equal_a_plain_run_bit_for_bit(tmp_path, bank):
    cold = generator(bank)
    assert torch.equal(make(cold).latent, plain(cold))
    off = make(generator(Bank(tmp_path / "bank", mode="off")))
    assert torch.equal(off.latent, plain(cold)) and off.report.decision == "off"


def test_the_same_request_again_is_bit_equal_and_costs_no_forward(bank):
    first = make(generator(bank))
    again = make(generator(bank))  # a new process would load the weights anew, too
    assert again.report.decision == "exact" and again.report.forwards == 0
    assert torch.equal(again.latent, first.latent)
    assert again.report.donor == first.report.written


def test_a_changed_word_borrows_and_leaves_no_donor(bank):
    maker = generator(bank)
    first = make(maker)
    second = make(maker, OTHER)
    assert second.report.decision == "joint" and second.report.donor == first.report.written
    assert second.report.forwards < STEPS and second.report.written is None
    assert [e.id for e in bank.ls()] == [first.report.written]
    kinds = [row.kind for row in sorted(second.report.steps, key=lambda row: row.index)]
    assert kinds[0] == "dense" and kinds[-1] == "dense" and len(kinds) == STEPS
    assert bank.ls()[0].uses == 1


def test_many_nearer_prompts_of_other_seeds_do_not_hide_a_donor(bank):
    maker = generator(bank)
    first = make(maker, seed=1, steps=4)
    for seed in range(2, 13):
        make(maker, OTHER, seed=seed, steps=4)
    second = make(maker, OTHER, seed=1, steps=4)
    assert second.report.decision == "joint" and second.report.donor == first.report.written


def test_a_joint_run_stays_near_its_own_dense_clip(bank):
    maker = generator(bank)
    make(maker, steps=24)
    borrowed = make(maker, OTHER, steps=24)
    dense = plain(maker, OTHER, steps=24)
    far = plain(maker, PROMPT, steps=24)
    assert (borrowed.latent - dense).pow(2).mean() < 0.1 * (far - dense).pow(2).mean()


def test_a_given_donor_reproduces_the_clip_bit_for_bit(bank):
    maker = generator(bank)
    make(maker)
    second = make(maker, OTHER)
    make(maker, PROMPT.replace("red", "yellow"), seed=9)
    again = make(maker, OTHER, donor=second.report.donor)
    assert torch.equal(again.latent, second.latent)


def test_an_unknown_donor_is_a_miss_that_says_so(bank):
    maker = generator(bank)
    make(maker)
    found = make(maker, OTHER, donor="0" * 32)
    assert found.report.decision == "miss" and "not usable" in found.report.reason
    assert torch.equal(found.latent, plain(maker, OTHER))


def test_another_seed_is_a_miss_that_names_the_remedy(bank):
    maker = generator(bank)
    make(maker)
    found = make(maker, OTHER, seed=2)
    assert found.report.decision == "miss" and "keep its seed" in found.report.reason
    assert torch.equal(found.latent, plain(maker, OTHER, seed=2))


def test_a_refused_donor_is_a_miss_with_named_discrepancies(bank):
    maker = generator(bank, Policy("strict", 0.0, 1, 9.0))
    make(maker)
    found = make(maker, OTHER)
    assert found.report.decision == "miss" and found.report.donor is None
    assert {"disagreement", "words", "scene", "region", "guidance"} <= set(found.report.discrepancies)
    assert found.report.risk > found.report.threshold == 0.0
    assert torch.equal(found.latent, plain(maker, OTHER)) and found.report.written


def test_another_guidance_shares_nothing(bank):
    make(generator(bank))
    other = Generator(bank, guidance=3.0)
    other.policy = GENEROUS
    found = make(other, OTHER)
    assert found.report.decision == "miss" and "guidance" in found.report.reason


def test_a_donor_with_another_number_of_steps_still_lends(bank):
    maker = generator(bank)
    make(maker, steps=20)
    found = make(maker, OTHER, steps=STEPS)
    assert found.report.decision == "joint"


def test_a_donor_with_far_fewer_steps_is_too_coarse_to_lend(bank):
    maker = generator(bank)
    make(maker, steps=6)
    found = make(maker, OTHER, steps=STEPS)
    assert found.report.decision == "miss" and "too few" in found.report.reason
    assert torch.equal(found.latent, plain(maker, OTHER))


def test_an_interrupted_run_leaves_nothing_and_the_next_one_is_normal(bank):
    maker = generator(bank)

    def interrupt(done: int, _: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(maker, on_step=interrupt)
    assert bank.ls() == []
    assert torch.equal(make(maker).latent, plain(maker))
    assert len(bank.ls()) == 1
    assert not any(b._forward_pre_hooks for b in maker.model.modules())


def run_of(bank: Bank, prompt: str, maker: Generator, **kwargs) -> Run:
    noise, levels = sample.noise([1], 32), sample.sigmas(STEPS)
    from carnator_core.backbones import wan

    grid = wan.grid_of(maker.model, tuple(noise.shape))
    return Run(maker.request(prompt, 1, noise, levels), bank, GENEROUS, grid, **kwargs)


def test_a_sampler_that_calls_between_the_steps_stays_dense_and_is_not_kept(bank):
    maker = generator(bank)
    make(maker)
    run, x0 = run_of(bank, OTHER, maker), torch.randn(1, 16, 5, 16, 16)
    for sigma, following in zip(run.sigmas, (*run.sigmas[1:], 0.0), strict=True):
        for level in (sigma, (sigma + following) / 2):
            assert run.answer(level) is None
            run.observe(level, x0, 0.0)
    report = run.finish(x0)
    assert report.decision == "miss" and "between the steps" in report.reason and report.written is None


def test_a_collapsed_answer_ends_the_reuse(bank):
    maker = generator(bank)
    make(maker)
    run = run_of(bank, OTHER, maker)
    asked = 0
    for index, sigma in enumerate(run.sigmas):
        answer = run.answer(sigma)
        if answer is None:
            asked += 1
            bad = math.nan if index >= run.probe else 1.0
            run.observe(sigma, torch.randn(1, 16, 5, 16, 16) * bad, 0.0)
        else:
            assert torch.isfinite(answer).all()
    report = run.finish(None)
    assert any("collapsed" in w for w in report.warnings) and asked > report.steps[-1].index / 2


def test_a_forced_plan_is_followed(bank):
    maker = generator(bank, Policy("strict", 0.0, 1, 9.0))
    make(maker)
    plan = paced_plan(sample.sigmas(STEPS)[:-1].tolist(), 2)
    found = make(maker, OTHER, forced=plan)
    assert {row.index for row in found.report.steps if row.kind == "skipped"} == plan.skipped


@pytest.mark.parametrize("tolerance", [9.0, 0.0])
def test_answers_that_are_off_by_more_than_the_policy_takes_make_it_compute_more(bank, tolerance):
    maker = generator(bank, Policy("watchful", 1.1, 3, tolerance))
    make(maker, steps=20)
    found = make(maker, OTHER, steps=20)
    planned = even_plan(sample.sigmas(20)[:-1].tolist(), maker.policy.computed(20, 2))
    skipped = {row.index for row in found.report.steps if row.kind == "skipped"}
    assert found.report.answer_error > 0 and "answers off by" in found.report.summary()
    assert skipped == planned.skipped if tolerance else skipped < planned.skipped
    exact, near = plain(maker, OTHER, steps=20), make(maker, OTHER, steps=20, forced=planned).latent
    if not tolerance:
        assert (found.latent - exact).norm() < (near - exact).norm()


def test_time_of_our_own_is_small_on_a_miss(bank):
    report = make(generator(bank), steps=50).report
    assert report.seconds["carnator"] < 0.5 * report.seconds["model"]  # loose: this model is tiny, machines are noisy


def test_few_levels_are_kept_of_large_clips_and_all_of_small_ones():
    assert kept_levels(50, 1000) == list(range(50))
    large = kept_levels(50, KEEP_BYTES)
    assert len(large) == KEEP_LEAST and large[0] == 0 and large[-1] == 49
    assert kept_levels(3, KEEP_BYTES) == [0, 1, 2]


def test_an_unknown_policy_names_the_known_ones():
    with pytest.raises(ValueError, match="balanced"):
        policy_named("wild")


def test_a_warning_of_the_bank_is_not_repeated_by_a_later_healthy_run(tmp_path):
    place = tmp_path / "bank"
    place.write_text("a file in the place of the folder")
    maker = generator(Bank(place))
    first = make(maker, steps=4)
    assert first.report.warnings and torch.equal(first.latent, plain(maker, steps=4))
    assert len(set(first.report.warnings)) == len(first.report.warnings)
    place.unlink()
    healthy = make(maker, OTHER, steps=4).report
    assert healthy.warnings == [] and healthy.written


def test_an_error_of_our_own_ends_the_reuse_and_not_the_run(bank, monkeypatch):
    from carnator_core.gate import choose
    from carnator_core.reuse import engine

    maker = generator(bank)
    make(maker)

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(choose, "gather", fail)
        found = make(maker, OTHER)
    assert torch.equal(found.latent, plain(maker, OTHER))
    assert found.report.decision == "miss" and "out of memory" in found.report.reason and not found.report.written
    with monkeypatch.context() as patched:
        patched.setattr(engine.DonorAnswer, "answer", fail)
        found = make(maker, OTHER)
    assert torch.equal(found.latent, plain(maker, OTHER))
    assert any("out of memory" in w for w in found.report.warnings) and not found.report.written


def test_sparse_attention_waits_for_a_hit_so_that_misses_become_donors(bank):
    maker = generator(bank, Policy("generous", 1.1, 1, 9.0))
    own = Connectivity(0.6, "portable")
    cold = make(maker, sparse=own)
    assert cold.report.written and {row.kind for row in cold.report.steps} == {"dense"}
    assert any("waits for a hit" in line for line in cold.report.warnings) and own.masks
    assert torch.equal(cold.latent, make(generator(Bank(bank.root, mode="off"))).latent)
    hit = make(maker, OTHER, sparse=Connectivity(0.6, "portable"))
    assert hit.report.decision == "joint" and hit.report.written is None
    assert {"dense", "skipped", "sparse"} <= {row.kind for row in hit.report.steps}
    alone = make(generator(Bank(bank.root, mode="off")), sparse=Connectivity(0.6, "portable"))
    assert "sparse" in {row.kind for row in alone.report.steps} and 0 < alone.report.scope.density < 1


def test_every_run_that_could_not_be_kept_says_so_and_a_later_healthy_one_does_not(tmp_path):
    place = tmp_path / "in the way"
    place.write_text("not a folder")
    maker = generator(Bank(place))
    for seed in (1, 2):  # in the same words twice
        told = make(maker, seed=seed).report
        assert told.written is None and any("in the way" in line for line in told.warnings)
    place.unlink()
    assert make(maker, seed=3).report.warnings == []
