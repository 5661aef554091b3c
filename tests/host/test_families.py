"""LTX-Video and HunyuanVideo in ComfyUI's own code, small and with random weights: the laws that hold on Wan."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.host.sampling import report, reusing, same

STEPS, FRAMES, SIDE, ROWS = 12, 3, 8, 20
PROMPT, OTHER = "a red ball", "a blue ball"
LTXV = dict(in_channels=128, cross_attention_dim=256, attention_head_dim=8, caption_channels=4096, num_layers=4)
HUNYUAN = dict(
    in_channels=16,
    out_channels=16,
    vec_in_dim=768,
    context_in_dim=4096,
    hidden_size=128,
    mlp_ratio=4.0,
    num_heads=1,
    depth=2,
    depth_single_blocks=2,
    axes_dim=[16, 56, 56],
    theta=256,
    patch_size=[1, 2, 2],
    qkv_bias=True,
    guidance_embed=True,
    byt5=False,
    meanflow=False,
    use_cond_type_embedding=False,
    vision_in_dim=None,
    meanflow_sum=False,
)
CHANNELS = {"LTXV": 128, "HunyuanVideo": 16}
TOKENS = {"LTXV": (FRAMES, SIDE, SIDE), "HunyuanVideo": (FRAMES, SIDE // 2, SIDE // 2)}


def built(kind: str, **changes) -> torch.nn.Module:
    """The family's own transformer as the host defines it."""
    import comfy.ops

    how = dict(dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init)
    if kind == "LTXV":
        from comfy.ldm.lightricks.model import LTXVModel

        return LTXVModel(**{**LTXV, **changes}, **how)
    from comfy.ldm.hunyuan_video.model import HunyuanVideo, HunyuanVideoParams

    known = {field.name for field in dataclasses.fields(HunyuanVideoParams)}
    return HunyuanVideo(**{k: v for k, v in {**HUNYUAN, **changes}.items() if k in known}, **how)


def loaded(kind: str, **changes):
    """Through the host's own loader and detection."""
    import comfy.sd

    draw, state = torch.Generator().manual_seed(0), {}
    for name, tensor in built(kind, **changes).state_dict().items():
        if tensor.ndim < 2:
            state[name] = torch.ones_like(tensor) if "norm" in name and "bias" not in name else torch.zeros_like(tensor)
        else:
            fan = math.prod(tensor.shape[1:]) if "table" not in name else 16
            state[name] = torch.randn(tensor.shape, generator=draw) * fan**-0.5
    return comfy.sd.load_diffusion_model_state_dict(state)


@pytest.fixture(scope="module", params=["LTXV", "HunyuanVideo"])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def family(host, kind):
    return loaded(kind)


def conditioning(host, kind: str, prompt: str, **changes) -> list:
    ((rows, _),) = host.run("CarnatorEmbeddedText", text=prompt)[0]
    rows = rows[:, :ROWS]
    beside = {"LTXV": {"attention_mask": (rows.abs().amax(-1) > 0).long(), "frame_rate": 25.0}}
    beside["HunyuanVideo"] = {"pooled_output": rows.mean(1)[:, :768], "guidance": 6.0}
    return [[rows, {**beside[kind], **changes}]]


def sampled(host, kind: str, model, prompt: str = PROMPT, beside: dict | None = None, **changes) -> dict:
    positive, negative = (conditioning(host, kind, text, **(beside or {})) for text in (prompt, ""))
    latent = {"samples": torch.zeros(1, CHANNELS[kind], FRAMES, SIDE, SIDE)}
    inputs = dict(positive=positive, negative=negative, latent_image=latent, seed=7, steps=STEPS, cfg=4.0)
    inputs |= dict(sampler_name="euler", scheduler="simple", denoise=1.0)
    return host.run("KSampler", model=model, **{**inputs, **changes})[0]


@pytest.mark.parametrize("sampler", ["euler", "res_multistep"])
@pytest.mark.parametrize("cfg", [4.0, 1.0])
def test_cold_equals_the_host_then_exact_then_joint(host, kind, family, cache, sampler, cfg):
    how = dict(sampler_name=sampler, cfg=cfg)
    plain = sampled(host, kind, family, **how)
    fast = reusing(host, family, cache)
    cold = sampled(host, kind, fast, **how)
    first = report(host, fast, cold)
    assert first["decision"] == "miss" and first["written"], first["reason"]
    assert same(cold, plain) and plain["samples"].std() > 0.1
    assert report(host, fast, sampled(host, kind, fast, **how))["decision"] == "exact"
    joint = sampled(host, kind, fast, OTHER, **how)
    told = report(host, fast, joint)
    assert told["decision"] == "joint" and told["forwards"] < STEPS and not told["warnings"]
    own = sampled(host, kind, family, OTHER, **how)
    far = (plain["samples"] - own["samples"]).pow(2).mean()
    assert (joint["samples"] - own["samples"]).pow(2).mean() < 0.5 * far


def test_region_steps_of_every_token_give_the_clip_of_full_steps(host, kind, family, cache, monkeypatch):
    """Half of the tokens give another clip at less cost, and the unchanged half stays near to it."""
    regions, scope = (host.module(f"carnator_core.reuse.{name}") for name in ("region", "scope"))
    monkeypatch.setattr(host.module("carnator_core.reuse.engine"), "REFRESH", 3)
    fast = reusing(host, family, cache)
    sampled(host, kind, fast)

    def joint(chosen: torch.Tensor | None) -> tuple[torch.Tensor, dict]:
        made = None if chosen is None else scope.Scope(chosen, chosen.float())
        monkeypatch.setattr(regions, "scope_of", lambda region, grid: made)
        out = sampled(host, kind, fast, OTHER)
        return out["samples"], report(host, fast, out)

    everything = torch.ones(TOKENS[kind], dtype=torch.bool)
    full, told = joint(None)
    whole, told_whole = joint(everything)
    assert told["decision"] == told_whole["decision"] == "joint" and told_whole["scope"]["active"] == 1
    assert "region" in {row["kind"] for row in told_whole["steps"]}
    assert (whole - full).abs().max() < 1e-3 * full.abs().max()
    half = everything.clone()
    half[..., half.shape[-1] // 2 :] = False
    partly, told_half = joint(half)
    assert told_half["forwards"] < told["forwards"]
    assert 0 < (partly - full).pow(2).mean() < 0.05 * full.var()


def test_of_few_steps_a_hit_computes_the_region_and_a_miss_is_the_run_itself(host, kind, family, cache, monkeypatch):
    half = torch.ones(TOKENS[kind], dtype=torch.bool)
    half[..., half.shape[-1] // 2 :] = False
    regions, scope = (host.module(f"carnator_core.reuse.{name}") for name in ("region", "scope"))
    monkeypatch.setattr(regions, "scope_of", lambda region, grid: scope.Scope(half, half.float()))
    monkeypatch.setattr(host.module("carnator_core.reuse.engine"), "WORTH", 2)
    fast = reusing(host, family, cache)
    sampled(host, kind, fast, steps=4)
    told = report(host, fast, sampled(host, kind, fast, OTHER, steps=4))
    assert [row["kind"] for row in told["steps"]] == ["dense", "region", "region", "dense"]
    strict = reusing(host, family, cache, "strict")
    missed = sampled(host, kind, strict, "a green ball", steps=4)
    assert report(host, strict, missed)["decision"] == "miss"
    assert same(missed, sampled(host, kind, family, "a green ball", steps=4))


def test_where_attention_has_a_mask_no_region_is_computed_and_the_report_says_so(host, cache, generous):
    model, kind = loaded("HunyuanVideo"), "HunyuanVideo"
    mask = torch.ones(1, ROWS).long()
    mask[:, -2:] = 0
    how, fast = dict(steps=4, cfg=1.0, beside={"attention_mask": mask}), reusing(host, model, cache)
    sampled(host, kind, fast, **how)
    told = report(host, fast, sampled(host, kind, fast, OTHER, **how))
    assert sorted(row["kind"] for row in told["steps"]) == ["dense", "dense", "dense", "skipped"]
    assert any("no region was computed" in w and "mask" in w for w in told["warnings"])


def test_the_signature_has_every_part(host, kind, family, cache):
    fast = reusing(host, family, cache)
    told = report(host, fast, sampled(host, kind, fast))
    entry = host.module("nodes.host.banks").bank_of(cache).open(told["written"])
    assert set(entry.signature) == {"conditioning", "x0", "cross", "guidance"}
    rows = len(entry.signature["conditioning"])
    assert 1 < rows < ROWS and entry.signature["cross"].shape == (rows, *TOKENS[kind])
    shares = entry.signature["cross"].float().sum(0)
    if kind == "LTXV":  # padding is hidden, so the prompt has all of the attention
        assert (shares - 1).abs().max() < 1e-2
    else:
        assert shares.max() < 1.01


def test_settings_beside_the_text_belong_to_the_identity(host, kind, family, cache):
    fast = reusing(host, family, cache)
    sampled(host, kind, fast)
    setting = {"LTXV": {"frame_rate": 30.0}, "HunyuanVideo": {"guidance": 3.0}}[kind]
    out = sampled(host, kind, fast, beside=setting)
    told = report(host, fast, out)
    assert told["decision"] == "miss" and "differs in extra" in told["reason"]
    assert same(out, sampled(host, kind, family, beside=setting))
    if kind == "HunyuanVideo":  # switched off, as FluxDisableGuidance does
        told = report(host, fast, sampled(host, kind, fast, beside={"guidance": None}))
        assert told["decision"] == "miss" and told["written"]


def test_what_else_speaks_of_the_prompt_makes_another_request(host, kind, family, cache):
    fast = reusing(host, family, cache)
    sampled(host, kind, fast)
    changed = {"LTXV": {"attention_mask": torch.ones(1, ROWS).long()}}
    changed["HunyuanVideo"] = {"pooled_output": torch.ones(1, 768)}
    positive = conditioning(host, kind, PROMPT, **changed[kind])
    told = report(host, fast, sampled(host, kind, fast, positive=positive))
    assert told["decision"] == "joint"


def test_sparse_attention_alone_keeps_the_clip_and_tells_its_density(host, kind, family):
    how = dict(steps=6, latent_image={"samples": torch.zeros(1, CHANNELS[kind], FRAMES, 16, 16)})
    plain = sampled(host, kind, family, **how)
    (fast,) = host.run("CarnatorSparseAttentionPatch", model=family, kept=0.95, kernel="portable")
    out = sampled(host, kind, fast, **how)
    told = report(host, fast, out)
    assert [row["kind"] for row in told["steps"]].count("sparse") == 4 and 0 < told["scope"]["density"] <= 1
    assert (out["samples"] - plain["samples"]).pow(2).mean() < 0.3 * plain["samples"].var()
    (whole,) = host.run("CarnatorSparseAttentionPatch", model=family, kept=1.0, kernel="portable")
    full = sampled(host, kind, whole, **how)
    assert (full["samples"] - plain["samples"]).abs().max() < 1e-2


def test_what_a_picture_brings_along_is_passed_through(host, cache):
    """A first frame that HunyuanVideo is to keep, and its model that takes a picture beside the latent."""
    for model, beside, reason in (
        (loaded("HunyuanVideo"), {"guiding_frame_index": 0}, "guiding_frame_index"),
        (loaded("HunyuanVideo", in_channels=33), {}, "HunyuanVideoI2V"),
    ):
        fast = reusing(host, model, cache)
        how = dict(beside=beside, steps=2, cfg=1.0)
        out = sampled(host, "HunyuanVideo", fast, **how)
        told = report(host, fast, out)
        assert told["decision"] == "off" and reason in told["reason"]
        assert same(out, sampled(host, "HunyuanVideo", model, **how))
