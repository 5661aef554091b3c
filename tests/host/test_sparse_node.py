"""Sparse attention in ComfyUI, alone and together with reuse."""

from __future__ import annotations

import pytest

from tests.host.sampling import OTHER, empty, report, reusing, same, sampled


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
