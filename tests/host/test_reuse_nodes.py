"""The reuse nodes in ComfyUI's own samplers: what is reused, what is bit-equal, what is passed through and why."""

from __future__ import annotations

import json

import pytest
import torch

WEIGHTS = "carnator_mini_t2v.safetensors"
LORA = "carnator_mini_fewstep_lora.safetensors"
PROMPT = "one large red ball moving left over the sea, steady camera"
OTHER = PROMPT.replace("ball", "cross")
STEPS = 12
GENEROUS = "generous"


@pytest.fixture(scope="module")
def model(host):
    (loaded,) = host.run("UNETLoader", unet_name=WEIGHTS, weight_dtype="default")
    return host.run("ModelSamplingSD3", model=loaded, shift=3.0)[0]


@pytest.fixture(scope="module", autouse=True)
def generous(host):
    """A policy that judges nothing away, so that tests do not hang on how good today's weights are."""
    policy = host.module("carnator_core.gate.policy")
    policy.POLICIES[GENEROUS] = policy.Policy(GENEROUS, 1.1, 3, 9.0)
    yield
    del policy.POLICIES[GENEROUS]


@pytest.fixture
def cache(host, request):
    name = "".join(c if c.isalnum() else "_" for c in request.node.name)[:80]
    return host.run("CarnatorReuseCache", name=name, budget_gb=1.0, mode="on")[0]


def text(host, prompt: str):
    return host.run("CarnatorEmbeddedText", text=prompt)[0]


def empty(host, batch: int = 1, size: int = 128):
    return host.run("EmptyHunyuanLatentVideo", width=size, height=size, length=17, batch_size=batch)[0]


def reusing(host, model, cache, policy: str = GENEROUS):
    return host.run("Carnator", model=model, policy=policy, cache=cache)[0]


def sampled(host, model, prompt: str = PROMPT, seed: int = 7, **changes) -> dict:
    inputs = dict(positive=text(host, prompt), negative=text(host, ""), latent_image=empty(host), steps=STEPS)
    inputs |= dict(cfg=4.0, sampler_name="euler", scheduler="simple", denoise=1.0)
    return host.run("KSampler", model=model, seed=seed, **{**inputs, **changes})[0]


def report(host, model, latent: dict) -> dict:
    _, words, _ = host.run("CarnatorReport", model=model, samples=latent)
    return json.loads(words.split("\n", 1)[1])


def same(a: dict, b: dict) -> bool:
    return torch.equal(a["samples"], b["samples"])


SAMPLERS = ("euler", "dpmpp_2m", "uni_pc", "res_multistep")


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("cfg", [4.0, 1.0])
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


def test_the_signature_has_every_part(host, model, cache):
    fast = reusing(host, model, cache)
    told = report(host, fast, sampled(host, fast))
    banks = host.module("nodes.host.banks")
    entry = banks.bank_of(cache).open(told["written"])
    assert set(entry.signature) == {"conditioning", "x0", "cross", "guidance"}
    rows, t, h, w = entry.signature["cross"].shape
    assert (t, h, w) == (5, 8, 8) and rows == len(entry.signature["conditioning"])
    assert entry.signature["cross"].float().sum(0).max() < 1.01  # attention that the text's padding shares


def test_taps_of_the_host_read_what_the_cores_own_taps_read(host, model, cache):
    """Same model, same prompt, same noise: the signature does not depend on who drives."""
    fast = reusing(host, model, cache)
    told = report(host, fast, sampled(host, fast, cfg=2.0))
    theirs = host.module("nodes.host.banks").bank_of(cache).open(told["written"]).signature
    core_bank = host.module("carnator_core.bank").Bank(host.folder_paths.get_output_directory() + "/core_bank")
    clip = host.module("carnator_core.pipelines").Generator(core_bank)(PROMPT, seed=7, size=32, steps=STEPS)
    mine = core_bank.open(clip.report.written).signature
    for name in ("x0", "cross", "guidance"):
        scale = mine[name].float().abs().mean()
        ratio = 1.0 if name != "guidance" else float(theirs[name].float().mean() / mine[name].float().mean())
        # the host tells branches as x0, the core as velocities: one factor, sigma, lies between them
        assert (theirs[name].float() / ratio - mine[name].float()).abs().mean() < 0.02 * scale, name


def test_off_bypassed_and_an_incomplete_chain_equal_the_host(host, model, cache):
    plain = sampled(host, model)
    (off,) = host.run("CarnatorReuseCache", name=cache.name, budget_gb=1.0, mode="off")
    for patched, reason in (
        (reusing(host, model, off), "the cache is off"),
        (host.run("CarnatorEarlyProbe", model=model, cache=cache, share=0.08)[0], "no gate is set"),
        (host.run("CarnatorCompatibilityGate", model=model, policy=GENEROUS, donor="")[0], "no reuse cache is set"),
    ):
        out = sampled(host, patched)
        told = report(host, patched, out)
        assert same(out, plain) and told["decision"] == "off" and reason in told["reason"]


def test_the_given_model_is_untouched(host, model, cache):
    before = (dict(model.attachments), {k: dict(v) for k, v in model.wrappers.items()}, str(model.model_options))
    fast = reusing(host, model, cache)
    sampled(host, fast, steps=3)
    after = (dict(model.attachments), {k: dict(v) for k, v in model.wrappers.items()}, str(model.model_options))
    assert after == before
    assert "predict_noise" not in str(fast.model_options.get("transformer_options", {}).get("wrappers", {}))


@pytest.mark.parametrize("order", ["probe first", "gate first"])
def test_single_nodes_compose_in_any_order(host, model, cache, order):
    def probe(m):
        return host.run("CarnatorEarlyProbe", model=m, cache=cache, share=0.25)[0]

    def gate(m):
        return host.run("CarnatorCompatibilityGate", model=m, policy=GENEROUS, donor="")[0]

    fast = gate(probe(model)) if order == "probe first" else probe(gate(model))
    sampled(host, fast)
    told = report(host, fast, sampled(host, fast, OTHER))
    kinds = [row["kind"] for row in told["steps"]]
    assert told["decision"] == "joint" and kinds[:3] == ["dense"] * 3  # a quarter of 12 steps


def test_a_donor_id_from_a_report_reproduces_the_clip(host, model, cache):
    fast = reusing(host, model, cache)
    sampled(host, fast)
    joint = sampled(host, fast, OTHER)
    donor = report(host, fast, joint)["donor"]
    sampled(host, fast, PROMPT.replace("red", "blue"), seed=8)
    (pinned,) = host.run("CarnatorCompatibilityGate", model=fast, policy=GENEROUS, donor=donor)
    assert same(sampled(host, pinned, OTHER), joint)


@pytest.mark.parametrize("short", ["always", "now and then"])
def test_split_guidance_batches_reuse_as_joint_ones_do(host, model, cache, short, monkeypatch):
    """The host computes both branches at once or in turn, as memory allows, from step to step."""
    regions, scope = (host.module(f"carnator_core.reuse.{name}") for name in ("region", "scope"))
    monkeypatch.setattr(host.module("carnator_core.reuse.engine"), "REFRESH", 3)
    asked = iter(range(10**6))

    def required(shape, **_):
        return 1e30 if short == "always" or next(asked) % 2 else 0.0

    fast = reusing(host, model, cache)
    monkeypatch.setattr(model.model, "memory_required", required)
    cold = sampled(host, fast)
    told = report(host, fast, cold)
    assert told["decision"] == "miss" and told["written"]
    half = torch.ones(5, 8, 8, dtype=torch.bool)
    half[..., 4:] = False
    monkeypatch.setattr(regions, "scope_of", lambda region, grid: scope.Scope(half, half, half.float()))
    joint = sampled(host, fast, OTHER)
    told = report(host, fast, joint)
    assert told["decision"] == "joint" and told["discrepancies"]["guidance"] > 0
    monkeypatch.undo()
    monkeypatch.setattr(host.module("carnator_core.reuse.engine"), "REFRESH", 3)
    monkeypatch.setattr(regions, "scope_of", lambda region, grid: scope.Scope(half, half, half.float()))
    together = sampled(host, fast, OTHER)
    assert (joint["samples"] - together["samples"]).pow(2).mean() < 0.02 * together["samples"].var()


@pytest.mark.parametrize("cfg", [4.0, 1.0])
def test_region_steps_of_every_token_give_the_clip_of_full_steps(host, model, cache, cfg, monkeypatch):
    """Half of the tokens give another clip, at less cost; afterwards the model is the host's own."""
    regions, scope = (host.module(f"carnator_core.reuse.{name}") for name in ("region", "scope"))
    monkeypatch.setattr(host.module("carnator_core.reuse.engine"), "REFRESH", 3)
    fast = reusing(host, model, cache)
    plain = sampled(host, fast, cfg=cfg)

    def joint(chosen) -> tuple[dict, dict]:
        made = None if chosen is None else scope.Scope(chosen, chosen, chosen.float())
        monkeypatch.setattr(regions, "scope_of", lambda region, grid: made)
        out = sampled(host, fast, OTHER, cfg=cfg)
        return out, report(host, fast, out)

    full, told = joint(None)
    everything = torch.ones(5, 8, 8, dtype=torch.bool)
    partly, told_partly = joint(everything)
    assert told["decision"] == told_partly["decision"] == "joint" and told_partly["scope"]["active"] == 1
    assert "region" in {row["kind"] for row in told_partly["steps"]}
    assert (partly["samples"] - full["samples"]).abs().max() < 1e-3 * full["samples"].abs().max()
    half = everything.clone()
    half[..., 4:] = False
    other, told_half = joint(half)
    assert told_half["forwards"] < told["forwards"] and not same(other, full)
    monkeypatch.undo()
    assert same(sampled(host, model, cfg=cfg), plain)


@pytest.mark.parametrize("pixels", [32, 64])
def test_a_changed_word_is_a_hit_that_the_judge_finds_right_with_fewer_calls_and_less_time(host, model, cache, pixels):
    """With the policy that people get, at the settings of the shipped workflow."""
    judge, world = (host.module(f"carnator_core.mini.{name}") for name in ("judge", "world"))
    fast, size = reusing(host, model, cache, "balanced"), empty(host, size=4 * pixels)
    settings = dict(cfg=2.0, steps=20, latent_image=size)
    cold = report(host, fast, sampled(host, fast, **settings))
    assert cold["decision"] == "miss"
    assert cold["seconds"]["carnator"] < (0.05 if pixels == 64 else 0.2) * cold["seconds"]["model"]  # some is fixed
    asked = PROMPT.replace("red", "yellow")
    joint = sampled(host, fast, asked, **settings)
    told = report(host, fast, joint)
    assert told["decision"] == "joint" and told["forwards"] <= 12, told["reason"]
    assert sum(told["seconds"].values()) < sum(cold["seconds"].values())
    (images,) = host.run("CarnatorEmbeddedDecode", samples=joint)
    read = judge.judge(images.permute(3, 0, 1, 2) * 2 - 1)
    assert all(judge.faithfulness(read, world.parse(asked)).values()), read


def test_with_the_few_step_lora_four_steps_make_the_clip_and_a_changed_word_needs_three(host, model, cache):
    judge, world = (host.module(f"carnator_core.mini.{name}") for name in ("judge", "world"))
    (few,) = host.run("LoraLoaderModelOnly", model=model, lora_name=LORA, strength_model=1.0)
    how, fast = dict(cfg=1.0, steps=4), reusing(host, few, cache, "balanced")
    cold = sampled(host, fast, **how)
    assert report(host, fast, cold)["written"] and same(cold, sampled(host, few, **how))
    asked = PROMPT.replace("red", "yellow")
    joint = sampled(host, fast, asked, **how)
    told = report(host, fast, joint)
    assert told["decision"] == "joint" and told["forwards"] == 3, told["reason"]
    (images,) = host.run("CarnatorEmbeddedDecode", samples=joint)
    found, scene = judge.measure(images.permute(3, 0, 1, 2) * 2 - 1), world.parse(asked)
    assert all(found.words[name] == getattr(scene, name) for name in found.words), found


def test_by_opt_in_a_run_takes_the_donors_seed_and_is_what_that_seed_gives(host, model, cache):
    fast = reusing(host, model, cache)
    sampled(host, fast)
    (taking,) = host.run("CarnatorCompatibilityGate", model=fast, policy=GENEROUS, donor="", seed_policy="donor")
    out = sampled(host, taking, OTHER, seed=8)
    told = report(host, taking, out)
    assert told["decision"] == "joint" and any("seed 7" in line for line in told["warnings"])
    assert same(out, sampled(host, fast, OTHER, seed=7))
    own = sampled(host, fast, OTHER, seed=8)
    assert report(host, fast, own)["decision"] == "miss" and same(own, sampled(host, model, OTHER, seed=8))


def lora(model, scale: float, strength: float = 1.0):
    """A clone with a LoRA-like patch on one weight."""
    clone = model.clone()
    key = "diffusion_model.blocks.0.self_attn.q.weight"
    delta = scale * torch.ones_like(model.model.state_dict()[key])
    clone.add_patches({key: ("diff", (delta,))}, strength)
    return clone


def test_weights_are_known_by_content_and_strength(host, model, cache):
    weights = host.module("nodes.host.identity").weights_of
    assert weights(model) == weights(model.clone())
    assert weights(lora(model, 0.1)) == weights(lora(model, 0.1))
    assert len({weights(m) for m in (model, lora(model, 0.1), lora(model, 0.2), lora(model, 0.1, 0.5))}) == 4
    sampled(host, lora(model, 0.1), steps=2)  # patches now lie on the loaded weights
    assert weights(model) == weights(model.clone()) and weights(lora(model, 0.1)) != weights(model)
    fast = reusing(host, model, cache)
    sampled(host, fast)
    patched = reusing(host, lora(model, 0.1), cache)
    told = report(host, patched, sampled(host, patched, OTHER))
    assert told["decision"] == "miss" and "weights" in told["reason"]


def test_an_error_after_the_donors_seed_was_taken_leaves_the_users_own_noise(host, model, cache, monkeypatch):
    fast = reusing(host, model, cache)
    sampled(host, fast)
    (taking,) = host.run("CarnatorCompatibilityGate", model=fast, policy=GENEROUS, donor="", seed_policy="donor")

    def broken(*_, **__):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(host.module("nodes.host.sampling"), "Run", broken)
    out = sampled(host, taking, OTHER, seed=8)
    assert report(host, taking, out)["decision"] == "off" and same(out, sampled(host, model, OTHER, seed=8))


def overridden(model, attention):
    """A clone whose attention another node replaced, as nodes for SageAttention do."""
    clone = model.clone()
    clone.model_options["transformer_options"] = {
        **clone.model_options.get("transformer_options", {}),
        "optimized_attention_override": attention,
    }
    return clone


def halving(share: float):
    calls = [0]  # a list, as a node may count its calls

    def attention(func, q, *args, **kwargs):
        return func(q * share, *args, **kwargs)

    def counting(func, *args, **kwargs):
        calls[0] += 1
        return attention(func, *args, **kwargs)

    return attention, counting


def test_another_attention_kernel_stays_in_force_and_belongs_to_the_identity(host, model, cache):
    """Its clips are its own: bit-equal on a miss, borrowed among themselves, never mixed with another kernel's."""
    soft, _ = halving(0.5)
    mine = overridden(model, soft)
    plain = sampled(host, mine)
    assert not same(plain, sampled(host, model))
    fast = reusing(host, mine, cache)
    told = report(host, fast, cold := sampled(host, fast))
    assert told["decision"] == "miss" and told["written"] and same(cold, plain)
    told = report(host, fast, sampled(host, fast, OTHER))
    assert told["decision"] == "joint"
    for other in (model, overridden(model, halving(0.6)[0])):
        told = report(host, fast, sampled(host, reusing(host, other, cache), OTHER))
        assert told["decision"] == "miss", told["reason"]
    passed = overridden(model, halving(0.5)[1])
    fast = reusing(host, passed, cache)
    told = report(host, fast, out := sampled(host, fast))
    assert told["decision"] == "off" and "list" in told["reason"] and same(out, plain)


def test_quantised_weights_are_read_from_their_parameters(host, cache):
    """Loaders of GGUF files put tensors without data into the state dict."""
    (loaded,) = host.run("UNETLoader", unet_name=WEIGHTS, weight_dtype="default")
    (own,) = host.run("ModelSamplingSD3", model=loaded, shift=3.0)
    weights = host.module("nodes.host.identity")
    linear = own.model.diffusion_model.blocks[0].ffn[0]

    def empty_state(destination, prefix, keep_vars):
        for name, tensor in linear.named_parameters(recurse=False):
            destination[prefix + name] = torch.zeros_like(tensor, device="meta")

    linear._save_to_state_dict = empty_state
    assert any(t.is_meta for t in own.model.state_dict().values())
    before = weights.weights_of(own)
    fast = reusing(host, own, cache)
    assert report(host, fast, sampled(host, fast, steps=4))["written"]
    with torch.no_grad():
        linear.weight.mul_(1.5)
    weights._BASE.pop(own.model)
    assert weights.weights_of(own) != before


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


def advanced(host, model, prompt, start, end, latent, noise="enable", leftover="disable", seed=7):
    inputs = dict(model=model, add_noise=noise, noise_seed=seed, steps=STEPS, cfg=4.0, sampler_name="euler")
    inputs |= dict(scheduler="simple", positive=text(host, prompt), negative=text(host, ""), latent_image=latent)
    inputs |= dict(start_at_step=start, end_at_step=end, return_with_leftover_noise=leftover)
    return host.run("KSamplerAdvanced", **inputs)[0]


def test_the_advanced_sampler_in_two_parts(host, model, cache):
    def both(m, prompt):
        first = advanced(host, m, prompt, 0, 6, empty(host), leftover="enable")
        return first, advanced(host, m, prompt, 6, 10000, first, noise="disable")

    fast = reusing(host, model, cache)
    for mine, plain in zip(both(fast, PROMPT), both(model, PROMPT), strict=True):
        assert same(mine, plain)
    for again, plain in zip(both(fast, PROMPT), both(model, PROMPT), strict=True):
        assert same(again, plain) and report(host, fast, again)["decision"] == "exact"
    first, second = both(fast, OTHER)
    for part in (first, second):  # the second goes on from another latent than the donor's, with the same (no) noise
        told = report(host, fast, part)
        assert told["decision"] == "joint" and told["forwards"] < len(told["steps"])
    own, far = both(model, OTHER)[1]["samples"], both(model, PROMPT)[1]["samples"]
    assert (second["samples"] - own).pow(2).mean() < 0.5 * (far - own).pow(2).mean()


def test_a_second_part_borrows_only_where_the_noise_of_its_first_part_is_known_to_be_the_same(host, model, cache):
    fast = reusing(host, model, cache)

    def second(latent, prompt):
        clip = advanced(host, fast, prompt, 6, 10000, latent, noise="disable")
        return report(host, fast, clip)

    seen = advanced(host, fast, PROMPT, 0, 6, empty(host), leftover="enable")
    assert second(seen, PROMPT)["written"]
    other_seed = advanced(host, fast, OTHER, 0, 6, empty(host), leftover="enable", seed=8)
    told = second(other_seed, OTHER)
    assert told["decision"] == "miss" and "seed" in told["reason"]
    unseen = advanced(host, model, OTHER, 0, 6, empty(host), leftover="enable")
    unseen["samples"] = unseen["samples"] + 1e-3  # another node's work between the parts
    told = second(unseen, OTHER)
    assert told["decision"] == "miss" and any("first part too" in line for line in told["warnings"])
    known = advanced(host, fast, OTHER, 0, 6, empty(host), leftover="enable")
    assert second(known, OTHER)["decision"] == "joint"


def test_by_opt_in_the_second_part_keeps_its_latent(host, model, cache):
    fast = reusing(host, model, cache)
    gate = dict(model=fast, policy=GENEROUS, seed_policy="donor", donor="")
    (willing,) = host.run("CarnatorCompatibilityGate", **gate)
    first = advanced(host, willing, PROMPT, 0, 6, empty(host), leftover="enable")
    advanced(host, willing, PROMPT, 6, 10000, first, noise="disable")
    start = advanced(host, model, OTHER, 0, 6, empty(host), leftover="enable", seed=8)
    mine = advanced(host, willing, OTHER, 6, 10000, start, noise="disable")
    assert same(mine, advanced(host, model, OTHER, 6, 10000, start, noise="disable"))


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


def test_an_interrupt_passes_through_and_the_next_run_is_normal(host, model, cache):
    import comfy.model_management as management

    fast = reusing(host, model, cache)
    guider_steps = []

    def interrupt(*_):
        guider_steps.append(1)
        if len(guider_steps) == 5:
            management.interrupt_current_processing()
            management.throw_exception_if_processing_interrupted()

    import comfy.sample

    noise = comfy.sample.prepare_noise(empty(host)["samples"], 7)
    with pytest.raises(management.InterruptProcessingException):
        conds = text(host, PROMPT), text(host, "")
        latent = empty(host)["samples"]
        comfy.sample.sample(fast, noise, STEPS, 4.0, "euler", "simple", *conds, latent, callback=interrupt, seed=7)
    bank = host.module("nodes.host.banks").bank_of(cache)
    assert bank.ls() == []
    assert same(sampled(host, fast), sampled(host, model)) and len(bank.ls()) == 1


def test_a_report_of_a_strange_latent_says_so(host, model, cache):
    fast = reusing(host, model, cache)
    told = report(host, fast, empty(host))
    assert told["decision"] == "off" and "not from a recent run" in told["reason"]


def test_the_region_is_drawn_over_the_frames(host, model, cache):
    fast = reusing(host, model, cache)
    sampled(host, fast)
    latent = sampled(host, fast, OTHER)
    (frames,) = host.run("CarnatorEmbeddedDecode", samples=latent)
    kept, _, drawn = host.run("CarnatorReport", model=fast, samples=latent, images=frames)
    assert kept is latent and drawn.shape == frames.shape and not torch.equal(drawn, frames)


@pytest.mark.parametrize("name", ["", "../elsewhere", "a/b", ".hidden"])
def test_a_cache_name_that_is_no_folder_name_is_refused(host, name):
    with pytest.raises(ValueError, match="plain folder name"):
        host.run("CarnatorReuseCache", name=name, budget_gb=1.0, mode="on")


def test_time_of_our_own_on_a_miss_is_told(host, model, cache):
    fast = reusing(host, model, cache)
    told = report(host, fast, sampled(host, fast, steps=20))
    assert 0 < told["seconds"]["carnator"] < told["seconds"]["model"]


def sparse(host, model, kept: float = 0.9, kernel: str = "portable"):
    return host.run("CarnatorSparseAttentionPatch", model=model, kept=kept, kernel=kernel)[0]


@pytest.mark.parametrize("cfg", [4.0, 1.0])
def test_sparse_attention_alone_keeps_the_clip_and_tells_its_density(host, model, cfg):
    large = empty(host, size=256)
    plain = sampled(host, model, latent_image=large, cfg=cfg, steps=6)
    fast = sparse(host, model)
    out = sampled(host, fast, latent_image=large, cfg=cfg, steps=6)
    told = report(host, fast, out)
    kinds = [row["kind"] for row in told["steps"]]
    assert kinds[0] == "dense" and kinds[-1] == "dense" and kinds.count("sparse") == 4
    assert told["decision"] == "off" and 0 < told["scope"]["density"] < 1 and told["written"] is None
    error = (out["samples"] - plain["samples"]).pow(2).mean()
    assert 0 < error < 0.3 * plain["samples"].var()


def test_sparse_attention_that_keeps_all_or_is_off_equals_the_host(host, model):
    plain = sampled(host, model)
    off = sparse(host, model, kernel="off")
    assert same(sampled(host, off), plain)
    whole = sampled(host, sparse(host, model, kept=1.0), cfg=4.0)
    assert (whole["samples"] - plain["samples"]).abs().max() < 1e-2


def test_the_automatic_kernel_steps_aside_on_short_clips_and_says_so(host, model):
    fast = sparse(host, model, kernel="auto")
    out = sampled(host, fast)
    told = report(host, fast, out)
    if all(row["kind"] == "dense" for row in told["steps"]):
        assert same(out, sampled(host, model)) and any("dense" in w for w in told["warnings"])
    else:  # a machine on which sparse wins even here must say by how much
        assert any("times dense" in w for w in told["warnings"])


def test_a_missed_run_is_full_and_becomes_a_donor_then_sparse_runs_borrow(host, model, cache):
    both = sparse(host, reusing(host, model, cache))
    cold = sampled(host, both)
    told = report(host, both, cold)
    assert told["decision"] == "miss" and told["written"] and same(cold, sampled(host, model))
    told = report(host, both, sampled(host, both, OTHER))
    kinds = {row["kind"] for row in told["steps"]}
    assert told["decision"] == "joint" and {"dense", "skipped", "sparse"} <= kinds and told["written"] is None
    (reading,) = host.run("CarnatorReuseCache", name=cache.name, budget_gb=1.0, mode="read only")
    told = report(host, both, sampled(host, sparse(host, reusing(host, model, reading)), seed=8))
    assert told["decision"] == "miss" and "sparse" in {row["kind"] for row in told["steps"]}  # it is not kept anyway


def test_the_pack_starts_without_the_heavy_libraries_of_the_core(host):
    """ComfyUI's start and its other packs must not pay for, or lack, what only pipelines need."""
    import subprocess
    import sys

    code = (
        "import sys; sys.path.insert(0, '.'); import carnator_core.bank, carnator_core.reuse.engine,"
        "carnator_core.attention.connectivity, carnator_core.mini.text, carnator_core.mini.codec;"
        "print([m for m in ('diffusers', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    root = str(host.pack.__file__).rsplit("/", 1)[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
