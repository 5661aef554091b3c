"""What counts as the same model: weights, patches, attention of other nodes."""

from __future__ import annotations

import torch

from tests.host.sampling import OTHER, WEIGHTS, report, reusing, same, sampled


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
