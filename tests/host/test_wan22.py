"""The layout of Wan 2.2 5B (48 latent channels) through ComfyUI's own loader, with a few small random layers."""

from __future__ import annotations

import json
import math

import pytest
import torch

WIDTH, LAYERS, CHANNELS, TEXT = 128, 6, 48, 4096
STEPS = 12


def weights(in_dim: int = CHANNELS) -> dict[str, torch.Tensor]:
    """Original Wan names; the head is not zero, so that layers and text matter."""
    draw = torch.Generator().manual_seed(0)
    sizes = {"patch_embedding": (WIDTH, in_dim, 1, 2, 2), "head.head": (CHANNELS * 4, WIDTH)}
    sizes |= {"text_embedding.0": (WIDTH, TEXT), "text_embedding.2": (WIDTH, WIDTH)}
    sizes |= {"time_embedding.0": (WIDTH, 256), "time_embedding.2": (WIDTH, WIDTH)}
    sizes |= {"time_projection.1": (6 * WIDTH, WIDTH)}
    state = {"head.modulation": torch.zeros(1, 2, WIDTH)}
    for i in range(LAYERS):
        block = f"blocks.{i}"
        state[f"{block}.modulation"] = torch.randn(1, 6, WIDTH, generator=draw) * 0.3
        for kind in ("self_attn", "cross_attn"):
            sizes |= {f"{block}.{kind}.{name}": (WIDTH, WIDTH) for name in "qkvo"}
            state |= {f"{block}.{kind}.norm_{name}.weight": torch.ones(WIDTH) for name in "qk"}
        state |= {f"{block}.norm3.weight": torch.ones(WIDTH), f"{block}.norm3.bias": torch.zeros(WIDTH)}
        sizes |= {f"{block}.ffn.0": (2 * WIDTH, WIDTH), f"{block}.ffn.2": (WIDTH, 2 * WIDTH)}
    for name, size in sizes.items():
        state[f"{name}.weight"] = torch.randn(size, generator=draw) * math.prod(size[1:]) ** -0.5
        state[f"{name}.bias"] = torch.zeros(size[0])
    return state


def loaded(state: dict[str, torch.Tensor]):
    import comfy.sd

    return comfy.sd.load_diffusion_model_state_dict(state)


@pytest.fixture(scope="module")
def model(host):
    return loaded(weights())


@pytest.fixture(scope="module", autouse=True)
def generous(host):
    policy = host.module("carnator_core.gate.policy")
    policy.POLICIES["generous 5b"] = policy.Policy("generous 5b", 1.1, 3, 9.0)
    yield
    del policy.POLICIES["generous 5b"]


def sampled(host, model, prompt: str, **changes) -> dict:
    positive, negative = (host.run("CarnatorEmbeddedText", text=text)[0] for text in (prompt, ""))
    inputs = dict(positive=positive, negative=negative, latent_image={"samples": torch.zeros(1, CHANNELS, 3, 8, 8)})
    inputs |= dict(seed=7, steps=STEPS, cfg=5.0, sampler_name="euler", scheduler="simple", denoise=1.0)
    return host.run("KSampler", model=model, **{**inputs, **changes})[0]


def told(host, model, latent: dict) -> dict:
    return json.loads(host.run("CarnatorReport", model=model, samples=latent)[1].split("\n", 1)[1])


def fast(host, model, name: str):
    (cache,) = host.run("CarnatorReuseCache", name=name, budget_gb=1.0, mode="on")
    return host.run("Carnator", model=model, policy="generous 5b", cache=cache)[0]


def test_the_host_takes_it_for_wan_22(model):
    assert type(model.model).__name__ == "WAN22"
    assert model.model.latent_format.latent_channels == CHANNELS


@pytest.mark.parametrize("sampler", ["euler", "uni_pc"])
def test_cold_equals_the_host_then_exact_then_joint(host, model, sampler):
    plain = sampled(host, model, "a red ball", sampler_name=sampler)
    reusing = fast(host, model, f"wan22_{sampler}")
    cold = sampled(host, reusing, "a red ball", sampler_name=sampler)
    first = told(host, reusing, cold)
    assert first["decision"] == "miss" and first["written"], first["reason"]
    assert torch.equal(cold["samples"], plain["samples"])
    assert told(host, reusing, sampled(host, reusing, "a red ball", sampler_name=sampler))["decision"] == "exact"
    joint = sampled(host, reusing, "a blue ball", sampler_name=sampler)
    found = told(host, reusing, joint)
    assert found["decision"] == "joint" and found["forwards"] < STEPS
    own = sampled(host, model, "a blue ball", sampler_name=sampler)
    assert (joint["samples"] - own["samples"]).pow(2).mean() < 0.05 * own["samples"].var()


def test_region_steps_of_every_token_give_the_clip_of_full_steps(host, model, monkeypatch):
    regions, scope = (host.module(f"carnator_core.reuse.{name}") for name in ("region", "scope"))
    monkeypatch.setattr(host.module("carnator_core.reuse.engine"), "REFRESH", 3)
    reusing = fast(host, model, "wan22_region")
    sampled(host, reusing, "a red ball")
    everything = torch.ones(3, 4, 4, dtype=torch.bool)
    clips = []
    for made in (None, scope.Scope(everything, everything.float())):
        monkeypatch.setattr(regions, "scope_of", lambda region, grid, made=made: made)
        clips.append(sampled(host, reusing, "a blue ball"))
    assert "region" in {row["kind"] for row in told(host, reusing, clips[1])["steps"]}
    assert (clips[0]["samples"] - clips[1]["samples"]).abs().max() < 1e-3 * clips[0]["samples"].abs().max()


@pytest.mark.parametrize("parts", [1, 3, 48])
def test_timesteps_of_chosen_tokens(host, parts):
    """One for all, one for each frame, or one for each token."""
    times = host.module("nodes.host.window")._times
    vec = torch.arange(parts).view(1, parts, 1, 1).expand(1, parts, 6, 2)
    index = torch.tensor([47, 0, 16])
    found = times(vec, 48, index)
    assert found.expand(1, 3, 6, 2)[0, :, 0, 0].tolist() == {1: [0, 0, 0], 3: [2, 0, 1], 48: [47, 0, 16]}[parts]


def test_a_model_with_more_inputs_is_passed_through(host):
    """As those that take a picture beside the latent."""
    model = loaded(weights(in_dim=CHANNELS + 4))
    reusing = fast(host, model, "wan22_picture")
    out = sampled(host, reusing, "a red ball", steps=2)
    assert told(host, reusing, out)["decision"] == "off" and "picture" in told(host, reusing, out)["reason"]
    assert torch.equal(out["samples"], sampled(host, model, "a red ball", steps=2)["samples"])
