"""Which of ComfyUI's samplers reuse, that they reuse well, and what is passed through untouched and why."""

from __future__ import annotations

import pytest
import torch

from tests.host.sampling import OTHER, PROMPT, STEPS, empty, report, reusing, same, sampled, text

SAMPLERS = ("euler", "dpmpp_2m", "uni_pc", "res_multistep")


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("cfg", [2.0, 1.0])  # far above the model's own guidance uni_pc's plain run is unstable
def test_cold_equals_the_host_then_exact_then_a_changed_word_is_joint(host, model, cache, sampler, cfg):
    plain = sampled(host, model, sampler_name=sampler, cfg=cfg)
    fast = reusing(host, model, cache)
    cold = sampled(host, fast, sampler_name=sampler, cfg=cfg)
    first = report(host, fast, cold)
    assert first["decision"] == "miss" and first["written"] and same(cold, plain), first
    again = sampled(host, fast, sampler_name=sampler, cfg=cfg)
    assert report(host, fast, again)["decision"] == "exact" and same(again, plain)
    joint = sampled(host, fast, OTHER, sampler_name=sampler, cfg=cfg)
    told = report(host, fast, joint)
    assert told["decision"] == "joint" and told["forwards"] < STEPS and told["donor"] == first["written"]
    own = sampled(host, model, OTHER, sampler_name=sampler, cfg=cfg)
    far = (plain["samples"] - own["samples"]).pow(2).mean()
    assert (joint["samples"] - own["samples"]).pow(2).mean() < 0.5 * far


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_corrected_answers_end_nearer_to_the_own_clip_in_every_sampler(host, model, cache, sampler, monkeypatch):
    how = dict(sampler_name=sampler, steps=20, cfg=2.0)
    own = sampled(host, model, OTHER, **how)["samples"]
    fast = reusing(host, model, cache)
    sampled(host, fast, **how)
    corrected = sampled(host, fast, OTHER, **how)
    assert report(host, fast, corrected)["decision"] == "joint"
    answerer = host.module("carnator_core.reuse.correction").CorrectedAnswer
    monkeypatch.setattr(answerer, "answer", lambda self, sigma: self.plain.answer(sigma))
    plain = sampled(host, fast, OTHER, **how)
    far, near = ((clip["samples"] - own).pow(2).mean() for clip in (plain, corrected))
    assert near < 0.5 * far


PASSED = {
    "random sampler": dict(sampler_name="euler_ancestral"),
    "several calls a step": dict(sampler_name="heun"),
    "unknown to us": dict(sampler_name="lcm"),
}


@pytest.mark.parametrize("case", PASSED)
def test_other_samplers_are_passed_through_bit_equal_with_the_reason(host, model, cache, case):
    fast = reusing(host, model, cache)
    sampled(host, fast)
    out = sampled(host, fast, OTHER, **PASSED[case])
    told = report(host, fast, out)
    assert told["decision"] == "off" and "sampler" in told["reason"]
    assert same(out, sampled(host, model, OTHER, **PASSED[case]))


def test_other_nodes_on_the_model_are_passed_through_with_their_name(host, model, cache):
    fast = reusing(host, model, cache)
    fast.set_model_sampler_cfg_function(lambda args: args["cond"])
    told = report(host, fast, sampled(host, fast))
    assert told["decision"] == "off" and "sampler_cfg_function" in told["reason"]


def test_a_noise_mask_and_several_conditionings_are_passed_through(host, model, cache):
    fast = reusing(host, model, cache)
    masked = {**empty(host), "noise_mask": torch.ones(1, 1, 5, 16, 16)}
    told = report(host, fast, sampled(host, fast, latent_image=masked))
    assert told["decision"] == "off" and "mask" in told["reason"]
    both = text(host, PROMPT) + text(host, OTHER)
    told = report(host, fast, sampled(host, fast, positive=both))
    assert told["decision"] == "off" and "2 parts" in told["reason"]


def test_a_batch_of_two_reuses(host, model, cache):
    fast = reusing(host, model, cache)
    two = empty(host, batch=2)
    assert same(sampled(host, fast, latent_image=two), sampled(host, model, latent_image=two))
    told = report(host, fast, sampled(host, fast, OTHER, latent_image=two))
    assert told["decision"] == "joint"


def custom(host, model, prompt, guided: bool):
    sigmas = host.run("BasicScheduler", model=model, scheduler="simple", steps=STEPS, denoise=1.0)[0]
    sampler = host.run("KSamplerSelect", sampler_name="euler")[0]
    common = dict(sampler=sampler, sigmas=sigmas, latent_image=empty(host))
    if not guided:
        more = dict(model=model, add_noise=True, noise_seed=7, cfg=4.0)
        texts = dict(positive=text(host, prompt), negative=text(host, ""))
        return host.run("SamplerCustom", **more, **texts, **common)[0]
    guider = host.run("BasicGuider", model=model, conditioning=text(host, prompt))[0]
    noise = host.run("RandomNoise", noise_seed=7)[0]
    return host.run("SamplerCustomAdvanced", noise=noise, guider=guider, **common)[0]


@pytest.mark.parametrize("guided", [False, True])
def test_the_custom_samplers(host, model, cache, guided):
    fast = reusing(host, model, cache)
    assert same(custom(host, fast, PROMPT, guided), custom(host, model, PROMPT, guided))
    told = report(host, fast, custom(host, fast, OTHER, guided))
    assert told["decision"] == "joint"


def test_few_steps(host, model, cache):
    fast = reusing(host, model, cache)
    assert same(sampled(host, fast, steps=4), sampled(host, model, steps=4))
    told = report(host, fast, sampled(host, fast, OTHER, steps=4))
    assert told["decision"] == "joint" and told["forwards"] == 3
