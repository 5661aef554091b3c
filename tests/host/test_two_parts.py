"""Runs in two parts (KSamplerAdvanced): what the second part may borrow."""

from __future__ import annotations

from tests.host.sampling import GENEROUS, OTHER, PROMPT, STEPS, empty, report, reusing, same, text


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
