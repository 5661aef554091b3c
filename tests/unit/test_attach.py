"""`attach` on a real diffusers WanPipeline with random weights: its own loop, schedulers, text encoder and decoder."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    MagCacheConfig,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import UMT5Config, UMT5EncoderModel

from carnator_core.attention.connectivity import Connectivity
from carnator_core.backbones import wan
from carnator_core.bank import Bank
from carnator_core.gate.policy import Policy
from carnator_core.grid import TokenGrid
from carnator_core.pipelines import attach, attached
from carnator_core.reuse import engine
from carnator_core.reuse import region as regions
from carnator_core.reuse.scope import Scope
from carnator_core.signature.taps import Taps, text_attention

STEPS = 10
GENEROUS = Policy("generous", 1.1, 2, 9.0)
SCHEDULERS = {
    "euler": lambda: FlowMatchEulerDiscreteScheduler(shift=3.0),
    "unipc": lambda: UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
}


class Letters:
    """A tokenizer of letters; files of a real one cannot be downloaded where tests run."""

    def __call__(self, text, max_length: int = 512, **_):
        ids = [[1 + ord(c) % 150 for c in t[: max_length - 1]] + [1] for t in text]
        mask = [[1] * len(row) + [0] * (max_length - len(row)) for row in ids]
        padded = [row + [0] * (max_length - len(row)) for row in ids]

        class Out:
            input_ids, attention_mask = torch.tensor(padded), torch.tensor(mask)

        return Out()


def transformer(**changes) -> WanTransformer3DModel:
    torch.manual_seed(0)
    config = dict(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=3,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    return WanTransformer3DModel(**{**config, **changes}).eval()


@pytest.fixture(scope="module")
def parts() -> dict:
    torch.manual_seed(1)
    config = UMT5Config(vocab_size=200, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0)
    vae = AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    return dict(text_encoder=UMT5EncoderModel(config).eval(), vae=vae.eval(), tokenizer=Letters())


def pipeline(parts: dict, scheduler: str = "euler", **changes) -> WanPipeline:
    made = WanPipeline(
        tokenizer=None,
        text_encoder=parts["text_encoder"],
        transformer=changes.pop("transformer", None) or transformer(),
        vae=parts["vae"],
        scheduler=SCHEDULERS[scheduler](),
        **changes,
    )
    made.tokenizer = parts["tokenizer"]
    made.set_progress_bar_config(disable=True)
    return made


def ask(call, prompt: str = "a red ball", seed: int = 3, **kwargs):
    given = dict(height=32, width=32, num_frames=5, num_inference_steps=STEPS, output_type="pt", max_sequence_length=24)
    given.update(kwargs)
    return call(prompt, generator=torch.Generator().manual_seed(seed), **given).frames


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_cold_exact_and_joint_through_the_pipelines_own_loop(parts, tmp_path, scheduler, guidance):
    pipe = pipeline(parts, scheduler)
    plain = ask(pipe, guidance_scale=guidance)
    fast = attach(pipe, bank=Bank(tmp_path))
    fast.policy = GENEROUS
    cold = ask(fast, guidance_scale=guidance)
    assert fast.report.decision == "miss" and torch.equal(cold, plain) and fast.report.written
    again = ask(fast, guidance_scale=guidance)
    assert fast.report.decision == "exact" and torch.equal(again, plain) and fast.report.forwards == 0
    joint = ask(fast, "a red cube", guidance_scale=guidance)
    assert fast.report.decision == "joint" and fast.report.forwards < STEPS
    own = ask(pipe, "a red cube", guidance_scale=guidance)
    assert (joint - own).abs().mean() < 0.5 * max((plain - own).abs().mean(), 1e-3) + 0.02


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_region_steps_of_every_token_give_the_clip_of_full_steps(parts, tmp_path, guidance, monkeypatch):
    monkeypatch.setattr(engine, "REFRESH", 3)
    pipe = pipeline(parts, transformer=transformer(num_layers=6))
    fast = attach(pipe, bank=Bank(tmp_path))
    fast.policy = GENEROUS
    ask(fast, guidance_scale=guidance, num_inference_steps=20)
    monkeypatch.setattr(regions, "scope_of", lambda region, grid: None)
    full = ask(fast, "a red cube", guidance_scale=guidance, num_inference_steps=20)
    assert fast.report.decision == "joint" and fast.report.scope.active is None
    everything = torch.ones(2, 2, 2, dtype=torch.bool)
    monkeypatch.setattr(regions, "scope_of", lambda region, grid: Scope(everything, everything.float()))
    partly = ask(fast, "a red cube", guidance_scale=guidance, num_inference_steps=20)
    assert "region" in {row.kind for row in fast.report.steps} and fast.report.scope.active == 1
    assert (partly - full).abs().max() < 1e-3
    assert all("forward" not in block.__dict__ for block in pipe.transformer.blocks)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_of_few_steps_a_hit_computes_the_region_and_a_miss_is_the_run_itself(parts, tmp_path, guidance, monkeypatch):
    half = torch.zeros(2, 2, 2, dtype=torch.bool)
    half[..., 0] = True
    monkeypatch.setattr(regions, "scope_of", lambda region, grid: Scope(half, half.float()))
    monkeypatch.setattr(engine, "WORTH", 2)
    pipe = pipeline(parts)
    fast = attach(pipe, bank=Bank(tmp_path))
    fast.policy = replace(GENEROUS, regions=2)
    ask(fast, guidance_scale=guidance, num_inference_steps=4)
    ask(fast, "a red cube", guidance_scale=guidance, num_inference_steps=4)
    assert kinds(fast.report) == ["dense", "region", "region", "dense"] and fast.report.scope.active == 0.5
    fast.policy = replace(GENEROUS, threshold=-1.0, regions=2)
    missed = ask(fast, "a blue cube", guidance_scale=guidance, num_inference_steps=4)
    assert fast.report.decision == "miss"
    assert torch.equal(missed, ask(pipe, "a blue cube", guidance_scale=guidance, num_inference_steps=4))


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_hits_attend_sparsely_and_misses_in_full(parts, tmp_path, guidance, monkeypatch):
    monkeypatch.setattr(attached, "Connectivity", lambda kept: Connectivity(kept, "portable"))
    pipe = pipeline(parts)
    fast = attach(pipe, bank=Bank(tmp_path), kept=0.5)
    fast.policy = GENEROUS
    big = dict(guidance_scale=guidance, height=128, width=128)
    assert torch.equal(ask(fast, **big), ask(pipe, **big)) and fast.report.written
    assert any("waits for a hit" in line for line in fast.report.warnings)
    joint = ask(fast, "a red cube", **big)
    assert fast.report.decision == "joint" and "sparse" in {row.kind for row in fast.report.steps}
    assert 0 < fast.report.scope.density < 1 and not torch.equal(joint, ask(pipe, "a red cube", **big))
    assert all(type(b.attn1.processor).__name__ == "WanAttnProcessor" for b in pipe.transformer.blocks)


def test_the_pipeline_itself_is_untouched_also_after_an_error(parts, tmp_path):
    pipe = pipeline(parts)
    fast = attach(pipe, bank=Bank(tmp_path))

    def fail(*_):
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        ask(fast, callback_on_step_end=fail)
    assert "forward" not in pipe.transformer.__dict__ and Bank(tmp_path).ls() == []
    assert not any(m._forward_pre_hooks for m in pipe.transformer.modules())
    assert torch.equal(ask(pipe), ask(fast))


def test_the_users_own_callback_sees_and_changes_what_it_did_before(parts, tmp_path):
    pipe = pipeline(parts)
    fast = attach(pipe, bank=Bank(tmp_path))
    seen: list[int] = []

    def halve(_pipe, index, _timestep, tensors):
        seen.append(index)
        return {"latents": tensors["latents"] * 0.5} if index == 2 else {}

    changed = ask(fast, callback_on_step_end=halve)
    assert seen == list(range(STEPS)) and torch.equal(changed, ask(pipe, callback_on_step_end=halve))
    assert fast.report.written is None and Bank(tmp_path).ls() == []  # no donor: the run was not the model's alone


def test_what_is_not_known_is_passed_through_with_a_reason(parts, tmp_path):
    pipe = pipeline(parts)
    fast = attach(pipe, bank=Bank(tmp_path))
    two = dict(num_videos_per_prompt=2)
    assert torch.equal(ask(fast, **two), ask(pipe, **two))
    assert fast.report.decision == "off" and "several clips" in fast.report.reason
    given = dict(attention_kwargs={"scale": 0.5})
    assert torch.equal(ask(fast, **given), ask(pipe, **given)) and "attention_kwargs" in fast.report.reason
    pipe.transformer.enable_cache(MagCacheConfig(calibrate=True))
    assert "only its first-block cache" in fast.unsupported()
    pipe.transformer.disable_cache()
    pipe.transformer.peft_config = {"style": object()}  # as a loaded, unfused LoRA leaves it
    assert "LoRA" in fast.unsupported()
    del pipe.transformer.peft_config
    assert fast.unsupported() is None and Bank(tmp_path).ls() == []
    pipe.scheduler.register_to_config(prediction_type="epsilon")
    assert "flow" in fast.unsupported()
    with pytest.raises(ValueError, match="policy"):
        attach(pipe, bank=Bank(tmp_path), policy="wild")


@pytest.fixture
def cached(parts):
    """A pipeline whose first-block cache answers often, and never at a threshold of 0."""
    pipe = pipeline(parts, transformer=transformer(num_layers=6))

    def switch(threshold: float | None) -> None:
        if pipe.transformer.is_cache_enabled:
            pipe.transformer.disable_cache()
        if threshold is not None:
            pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))

    return pipe, switch


def kinds(report) -> list[str]:
    return [row.kind for row in report.steps]


def test_a_hit_composes_with_a_first_block_cache(cached, tmp_path):
    pipe, switch = cached
    fast = attach(pipe, bank=Bank(tmp_path), kept=0.9)
    fast.policy = GENEROUS
    ask(fast)
    ask(fast, "a red cube")
    alone = fast.report
    assert alone.decision == "joint" and "cached" not in kinds(alone)
    switch(0.5)
    plain = ask(pipe, "a blue cone")
    missed = ask(fast, "a blue cone", seed=4)
    assert fast.report.decision == "miss" and torch.equal(missed, ask(pipe, "a blue cone", seed=4))
    assert "cached" in kinds(fast.report) and fast.report.written is None and len(Bank(tmp_path).ls()) == 1
    assert any("makes no donor" in w for w in fast.report.warnings)
    ask(fast, "a blue cone")
    both = fast.report
    assert both.decision == "joint" and {"skipped", "cached"} <= set(kinds(both)) and both.forwards < alone.forwards
    assert any("stands down" in w for w in both.warnings)  # the sparse attention that was asked for
    assert torch.equal(ask(pipe, "a blue cone"), plain)  # nothing of ours stays behind in the cache


def test_region_steps_stand_down_beside_a_first_block_cache(cached, tmp_path, monkeypatch):
    pipe, switch = cached
    fast = attach(pipe, bank=Bank(tmp_path))
    fast.policy = GENEROUS
    monkeypatch.setattr(engine, "REFRESH", 3)
    everything = torch.ones(2, 2, 2, dtype=torch.bool)
    monkeypatch.setattr(regions, "scope_of", lambda region, grid: Scope(everything, everything.float()))
    ask(fast, num_inference_steps=20)
    ask(fast, "a red cube", num_inference_steps=20)
    assert "region" in kinds(fast.report)
    switch(0.0)
    ask(fast, "a red cube", num_inference_steps=20)
    assert fast.report.decision == "joint" and "region" not in kinds(fast.report)


def test_a_first_block_cache_that_never_answers_leaves_a_run_a_donor(cached, tmp_path):
    pipe, switch = cached
    switch(0.0)
    fast = attach(pipe, bank=Bank(tmp_path))
    ask(fast)
    assert set(kinds(fast.report)) == {"dense"} and fast.report.written


def test_an_interrupted_cached_run_leaves_nothing_to_the_next(cached, tmp_path):
    pipe, switch = cached
    switch(0.5)
    fast = attach(pipe, bank=Bank(tmp_path))
    first = ask(fast)

    def interrupt(_pipe, index, *_):
        if index == 3:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        ask(fast, "a red bell", callback_on_step_end=interrupt)
    assert torch.equal(ask(fast), first)


def test_changed_weights_share_nothing(parts, tmp_path):
    pipe = pipeline(parts)
    fast = attach(pipe, bank=Bank(tmp_path))
    ask(fast)
    with torch.no_grad():
        pipe.transformer.blocks[0].attn1.to_q.weight.mul_(1.01)
    ask(fast)
    assert fast.report.decision == "miss" and "weights" in fast.report.reason


def test_another_negative_prompt_shares_nothing(parts, tmp_path):
    fast = attach(pipeline(parts), bank=Bank(tmp_path))
    ask(fast)
    ask(fast, negative_prompt="blurry")
    assert fast.report.decision == "miss" and "negative" in fast.report.reason


def test_taps_read_the_attention_that_the_model_computes(monkeypatch):
    """Queries and keys that a tap computes are those that the block hands to attention, rotary position included."""
    from diffusers.models.transformers import transformer_wan

    model, seen = transformer(), []
    original = transformer_wan.dispatch_attention_fn
    monkeypatch.setattr(
        transformer_wan,
        "dispatch_attention_fn",
        lambda q, k, v, **kw: seen.append((q, k)) or original(q, k, v, **kw),
    )
    x, text = torch.randn(1, 16, 2, 8, 6), torch.randn(1, 7, 32)
    taps = Taps(TokenGrid(2, 4, 3), 7)
    with torch.no_grad():
        plain = model(x, torch.tensor([500.0]), text, return_dict=False)[0]
        seen.clear()
        with wan.tapped(model, taps):
            tapped = model(x, torch.tensor([500.0]), text, return_dict=False)[0]
    assert torch.equal(plain, tapped)
    middle = len(model.blocks) // 2
    own, cross = seen[2 * middle], seen[2 * middle + 1]
    for mine, theirs in zip(taps.self_qk, own, strict=True):
        torch.testing.assert_close(mine, theirs[0].transpose(0, 1))
    expected = text_attention(cross[0][0].transpose(0, 1), cross[1][0].transpose(0, 1), 7)
    torch.testing.assert_close(taps.cross.flatten(1), expected)
    assert taps.cross.sum(0).allclose(torch.ones(2, 4, 3), atol=1e-5)
