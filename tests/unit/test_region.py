"""Region steps: the scope around an evidence region, and a window of layers that computes a part of the tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from carnator_core import backbones
from carnator_core.bank import Bank
from carnator_core.gate.policy import POLICIES, Policy
from carnator_core.grid import TokenGrid, dilate
from carnator_core.mini import few_step, sample, text
from carnator_core.mini import model as mini
from carnator_core.pipelines import Generator
from carnator_core.reuse import context as context_module
from carnator_core.reuse import region as region_module
from carnator_core.reuse.context import Context
from carnator_core.reuse.plan import Plan, drawn_plan, paced_plan, plan_of
from carnator_core.reuse.region import RegionSteps
from carnator_core.reuse.scope import LARGEST, scope_of
from carnator_core.reuse.trajectory import Trajectory
from carnator_core.reuse.window import TokenWindow

GRID = TokenGrid(5, 16, 16)
TOKENS = 320  # of a clip of 32 pixels


# --- scope -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 4), st.integers(0, 15), st.integers(0, 15), st.sampled_from([8, 16, 22, 44]))
def test_a_scope_surrounds_its_region_frame_by_frame(t, y, x, rows):
    grid = TokenGrid(5, rows, rows)
    region = torch.zeros(5, rows, rows, dtype=torch.bool)
    region[t, min(y, rows - 1), min(x, rows - 1)] = True
    scope = scope_of(region, grid)
    assert torch.equal(scope.active, dilate(region, grid.scaled(2)))
    assert (scope.weight[region] == 1).all() and torch.equal(scope.weight > 0, scope.active)
    assert not scope.active[[f for f in range(5) if f != t]].any()
    wider = dilate(region, 1) & ~region
    assert (scope.weight[wider] < 1).all() and (scope.weight[wider] >= scope.weight[scope.active & ~region].max()).all()
    assert torch.equal(scope.active.flatten()[scope.index], torch.ones(len(scope.index), dtype=torch.bool))


def test_no_scope_where_nothing_changes_or_nearly_everything():
    assert scope_of(torch.zeros(5, 16, 16, dtype=torch.bool), GRID) is None
    assert scope_of(torch.ones(5, 16, 16, dtype=torch.bool), GRID) is None
    region = torch.zeros(5, 16, 16, dtype=torch.bool)
    region[:, :8, :8] = True
    assert 0.25 < scope_of(region, GRID).active_share <= LARGEST


# --- plan --------------------------------------------------------------------------------------------------------


def test_regional_keeps_probe_finish_and_every_nth_computed_step_full():
    plan = paced_plan([1 - i / 20 for i in range(20)], 1).regional(3)
    assert str(plan).startswith("##.#.o.o.#")
    assert plan.skipped == paced_plan(plan.sigmas, 1).skipped and plan.region
    assert str(paced_plan(plan.sigmas, 1).regional(1)) == str(paced_plan(plan.sigmas, 1))
    with pytest.raises(ValueError, match="both|cannot"):
        Plan((1.0, 0.5), frozenset({1}), frozenset({1}))


def test_a_policy_s_plan_of_few_steps_has_regions_where_they_can_be_computed():
    levels = sample.sigmas(4)[:-1].tolist()
    assert [str(plan_of(POLICIES[name], levels, 1)) for name in POLICIES] == ["##.#", "#oo#", "#o.#"]
    assert str(plan_of(POLICIES["fast"], levels, 1, regions=False)) == "##.#"
    assert not plan_of(POLICIES["fast"], sample.sigmas(50)[:-1].tolist(), 4).region
    assert str(drawn_plan(levels, "drsd")) == "#o.#"
    for bad in ("drs", "drxd"):
        with pytest.raises(ValueError, match="no plan"):
            drawn_plan(levels, bad)


# --- window ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return mini.load()


@torch.no_grad()
def predicted(model, window: TokenWindow | None, index: torch.Tensor | None = None, seed: int = 3) -> torch.Tensor:
    x, cond, uncond = sample.noise([seed], 32), text.encode(["two red balls"]), text.encode([""])
    if window is None:
        return sample.guided_x0(model, x, 0.6, cond, uncond, 2.0)
    window.begin(index)
    with backbones.find(model).windowed(model, window):
        return sample.guided_x0(model, x, 0.6, cond, uncond, 2.0)


def test_a_full_step_through_the_window_changes_no_bit(model):
    plain = predicted(model, None)
    assert torch.equal(predicted(model, TokenWindow(len(model.blocks))), plain)
    assert torch.equal(predicted(model, None), plain)  # and the model is its own again


def test_all_tokens_in_any_order_give_the_full_step(model):
    plain, window = predicted(model, None), TokenWindow(len(model.blocks))
    predicted(model, window)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    found = predicted(model, window, order)
    assert window.was_partial
    assert (found - plain).abs().max() < 1e-3 * plain.abs().max()


def test_without_a_full_step_before_all_tokens_are_computed(model):
    window = TokenWindow(len(model.blocks))
    assert torch.equal(predicted(model, window, torch.arange(10)), predicted(model, None))
    assert not window.was_partial


@pytest.mark.parametrize("add", [torch.add, torch.Tensor.add_], ids=["anew", "in place"])
def test_tokens_that_are_not_chosen_take_over_the_last_full_steps_change(add):
    """Whatever a host's blocks do with their input."""
    window, layers = TokenWindow(10), 10
    hidden = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([4, 1])

    def through(hidden, index, scale):
        window.begin(index)
        hidden = hidden.clone()
        for layer in range(layers):
            hidden = window.block(layer, hidden, lambda h, _, s=scale: add(attended(window, h), s))
        return hidden

    through(hidden, None, 1.0)
    later = through(hidden, chosen, 3.0)
    outside, depth = layers - window.depth, window.depth
    assert window.was_partial
    expected = hidden + 3.0 * outside + 1.0 * depth
    expected[:, chosen] = hidden[:, chosen] + 3.0 * layers
    assert torch.allclose(later, expected)
    assert (window.first, window.depth) == (2, 8)


def attended(window: TokenWindow, hidden: torch.Tensor) -> torch.Tensor:
    """A block's attention that leaves the tokens as they are, and one to a text behind it."""
    window.attend(lambda q, k, v: q, hidden, hidden, hidden)
    return window.attend(lambda q, k, v: q, hidden, hidden[:, :1], hidden[:, :1])


def test_the_paper_s_layers_before_the_window():
    assert (TokenWindow(30).first, TokenWindow(30).depth) == (6, 24)
    assert TokenWindow(1).depth == 0  # nothing behind the first


# --- what is not computed and yet seen ---------------------------------------------------------------------------


def test_attention_sees_the_others_as_they_were_and_the_chosen_as_they_are():
    """Cross-attention, the second of a block, passes untouched."""
    window, seen = TokenWindow(2), []
    before, after = (torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    chosen = torch.tensor([4, 1])

    def dense(q, k, v):
        seen.append((k.clone(), v.clone()))
        return q

    def run(hidden, _):
        hidden = window.attend(dense, hidden, 2 * hidden, 3 * hidden)
        return window.attend(dense, hidden, hidden[:, :1], hidden[:, :1])

    for hidden, index in ((before, None), (after, chosen)):
        window.begin(index)
        for layer in (0, 1):
            window.block(layer, hidden, run)
    keys, values = seen[-2]
    mixed = before.clone()
    mixed[:, chosen] = after[:, chosen]
    assert torch.equal(keys, 2 * mixed) and torch.equal(values, 3 * mixed)
    assert seen[-1][0].shape == (1, 1, 4)


@pytest.mark.parametrize("text", [(0, 2), (6, 8)], ids=["text in front", "text behind"])
def test_text_of_a_joint_sequence_is_always_the_new_one(text):
    context = Context(depth=1)
    old, new = torch.zeros(1, 2, 8, 4), torch.ones(1, 2, 3, 4)  # six tokens of the video, then one of them
    context.keep("cond", 0, old, old, text)
    assert context.knows("cond")
    range_of_new = (0, 2) if text[0] == 0 else (1, 3)
    keys, values = context.around("cond", 0, torch.tensor([5]), new, new, range_of_new)
    video = keys[:, :, 2:] if text[0] == 0 else keys[:, :, :6]
    assert keys.shape == values.shape == (1, 2, 8, 4)
    assert keys[:, :, slice(*text)].eq(1).all() and video.sum() == 2 * 4 and video[:, :, 5].eq(1).all()


def test_what_is_too_large_to_remember_is_computed_in_full_and_said(model):
    plain, window = predicted(model, None), TokenWindow(len(model.blocks))
    window.context.budget = 10**5
    predicted(model, window)
    assert "more than 0.0 GB" in window.context.refused
    assert torch.equal(predicted(model, window, torch.arange(10)), plain) and not window.was_partial


def test_a_masked_attention_is_not_remembered():
    window, hidden = TokenWindow(2), torch.zeros(1, 6, 4)
    window.begin(None)
    for layer in (0, 1):
        window.block(layer, hidden, lambda h, _: window.attend(lambda q, k, v: q, h, h, h, known=False))
    assert not window.context.knows(0) and "mask" in window.context.missing()


def test_a_full_step_whose_forwards_have_other_names_replaces_what_was_known():
    """A host that is short of memory computes the guidance branches in turn, from step to step as it can."""
    window, hidden = TokenWindow(2), torch.zeros(1, 6, 4)
    assert "not seen" in window.context.missing()
    for names in (((0, 1),), ((0,), (1,))):
        window.begin(None)
        for name in names:
            for layer in (0, 1):
                window.block(layer, hidden, lambda h, _: attended(window, h), name)
    assert [window.context.knows(name) for name in ((0, 1), (0,), (1,))] == [False, True, True]


def test_the_models_own_blocks_return_after_an_error(model):
    def broken(*_):
        raise RuntimeError("out of memory")

    window = TokenWindow(len(model.blocks))
    window.block = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        predicted(model, window)
    assert all("forward" not in block.__dict__ for block in model.blocks)


# --- a run -------------------------------------------------------------------------------------------------------


PROMPT = "one small red ball moving left over the sea, steady camera"
OTHER = PROMPT.replace("red", "yellow")


@pytest.fixture(scope="module")
def lent(tmp_path_factory):
    """A generator whose bank holds PROMPT, that donor's id, and a plan."""
    make = Generator(Bank(tmp_path_factory.mktemp("region")))
    make.policy = Policy("generous", 1.1, 1, 9.0)
    donor = make(PROMPT, 7, 32, 12).report.written
    return make, donor, paced_plan(sample.sigmas(12)[:-1].tolist(), 1)


def test_a_run_with_region_steps_costs_less_and_says_so(lent):
    make, donor, plan = lent
    region = torch.zeros(5, 8, 8, dtype=torch.bool)
    region[:, 3:5, 3:5] = True
    skipped = make(OTHER, 7, 32, 12, donor=donor, forced=plan)
    partly = make(OTHER, 7, 32, 12, donor=donor, forced=plan.regional(99), region=region)
    kinds = "".join({"skipped": ".", "region": "o", "dense": "#"}[row.kind] for row in partly.report.steps)
    assert kinds == str(plan.regional(99)) and partly.report.written is None
    assert partly.report.forwards < skipped.report.forwards
    assert 0 < partly.report.scope.active < 1 and partly.report.scope.context == 1 - partly.report.scope.active
    far = (skipped.latent - partly.latent).pow(2).mean()
    assert 0 < far < 0.1 * skipped.latent.var()


FEW = Policy("few", 1.1, 3, 9.0, regions=2)


@pytest.fixture
def few(tmp_path) -> Generator:
    """The few-step companion, with a bank that holds PROMPT."""
    make = Generator(Bank(tmp_path), guidance=few_step.GUIDANCE, model=few_step.load())
    make.policy = FEW
    assert make(PROMPT, 7, 64, few_step.STEPS).report.written
    return make


def test_of_few_steps_the_middle_ones_compute_the_region(few):
    place = torch.zeros(5, 16, 16, dtype=torch.bool)
    place[:, 6:10, 5:11] = True
    clip = few(OTHER, 7, 64, few_step.STEPS, region=place)
    assert clip.report.decision == "joint" and clip.report.written is None
    assert [row.kind for row in clip.report.steps] == ["dense", "region", "region", "dense"]
    assert 2 < clip.report.forwards < 3 and 0 < clip.report.scope.active < 0.6
    own = sample.sample(few.model, [OTHER], [7], 64, few_step.STEPS, few_step.GUIDANCE)
    few.policy = replace(FEW, regions=0)
    skipped = few(OTHER, 7, 64, few_step.STEPS, forced=drawn_plan(sample.sigmas(4)[:-1].tolist(), "dssd"))
    assert (clip.latent - own).pow(2).mean() < 0.8 * (skipped.latent - own).pow(2).mean()


def test_of_few_steps_a_large_region_is_not_worth_it(few):
    large = torch.zeros(5, 16, 16, dtype=torch.bool)
    large[:, 4:12, 4:12] = True
    clip = few(OTHER, 7, 64, few_step.STEPS, region=large)
    assert clip.report.decision == "joint" and clip.report.forwards == 3 and clip.report.scope.active is None


def test_few_steps_without_a_place_that_differs_are_skipped_as_others_are(few, monkeypatch):
    monkeypatch.setattr(region_module, "scope_of", lambda region, grid: None)
    clip = few(OTHER, 7, 64, few_step.STEPS)
    assert sorted(row.kind for row in clip.report.steps) == ["dense", "dense", "dense", "skipped"]


def test_few_steps_whose_context_is_too_large_are_skipped_as_others_are_and_say_so(few, monkeypatch):
    monkeypatch.setattr(context_module, "BUDGET", 10**5)
    clip = few(OTHER, 7, 64, few_step.STEPS)
    assert clip.report.decision == "joint" and clip.report.scope.active is None
    assert any("no region was computed" in warning for warning in clip.report.warnings)


def test_a_miss_that_had_remembered_for_regions_is_the_run_itself(few, monkeypatch):
    """And gives the memory back at once."""
    few.policy, order = replace(FEW, threshold=-1.0), []
    release, forward = context_module.Context.release, few.model.forward
    monkeypatch.setattr(context_module.Context, "release", lambda c: order.append("release") or release(c))
    monkeypatch.setattr(few.model, "forward", lambda *a, **k: order.append("forward") or forward(*a, **k))
    clip = few(OTHER, 7, 64, few_step.STEPS)
    assert order[:2] == ["forward", "release"] and order.count("forward") == few_step.STEPS
    assert clip.report.decision == "miss" and clip.report.written
    assert torch.equal(clip.latent, sample.sample(few.model, [OTHER], [7], 64, few_step.STEPS, few_step.GUIDANCE))


def test_a_difference_nearly_everywhere_makes_region_steps_full_ones(lent):
    make, donor, plan = lent
    everywhere = torch.ones(5, 8, 8, dtype=torch.bool)
    skipped = make(OTHER, 7, 32, 12, donor=donor, forced=plan)
    full = make(OTHER, 7, 32, 12, donor=donor, forced=plan.regional(99), region=everywhere)
    assert torch.equal(full.latent, skipped.latent) and full.report.scope.active is None


def test_the_scope_follows_the_difference_from_full_step_to_full_step():
    grid = TokenGrid(1, 16, 16)
    donor = torch.randn(2, 1, 4, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    steps = RegionSteps(30, grid)
    assert steps.possible and not RegionSteps(0, grid).possible and not RegionSteps(1, grid).possible
    steps.follow(Trajectory([0.9, 0.5], donor))
    steps.look(0.9, donor[0])
    assert steps.scope is None  # nothing differs yet
    moved = donor[1].clone()
    moved[..., 8:16, 8:16] += 3
    steps.look(0.5, moved)
    assert steps.scope.active[:, 4:8, 4:8].all() and not steps.scope.active[:, 12:, :].any()
    steps.look(0.5, donor[1] + 3)
    assert steps.scope is None  # everything differs
