"""The reuse nodes in a run: composed, off, repeated, interrupted, reported; what is reused and what is bit-equal."""

from __future__ import annotations

import pytest
import torch

from tests.host.sampling import GENEROUS, LORA, OTHER, PROMPT, STEPS, empty, report, reusing, same, sampled, text


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
    monkeypatch.setattr(regions, "scope_of", lambda region, grid: scope.Scope(half, half.float()))
    joint = sampled(host, fast, OTHER)
    told = report(host, fast, joint)
    assert told["decision"] == "joint" and told["discrepancies"]["guidance"] > 0
    monkeypatch.undo()
    monkeypatch.setattr(host.module("carnator_core.reuse.engine"), "REFRESH", 3)
    monkeypatch.setattr(regions, "scope_of", lambda region, grid: scope.Scope(half, half.float()))
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
        made = None if chosen is None else scope.Scope(chosen, chosen.float())
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


def test_an_error_after_the_donors_seed_was_taken_leaves_the_users_own_noise(host, model, cache, monkeypatch):
    fast = reusing(host, model, cache)
    sampled(host, fast)
    (taking,) = host.run("CarnatorCompatibilityGate", model=fast, policy=GENEROUS, donor="", seed_policy="donor")

    def broken(*_, **__):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(host.module("nodes.host.sampling"), "Run", broken)
    out = sampled(host, taking, OTHER, seed=8)
    assert report(host, taking, out)["decision"] == "off" and same(out, sampled(host, model, OTHER, seed=8))


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
