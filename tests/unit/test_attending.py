"""Self-attention in another's hands: what stands in answers, and the model is its own again afterwards."""

from __future__ import annotations

import pytest
import torch

from carnator_core import backbones
from carnator_core.attention.blocks import BlockMask, top_mask
from carnator_core.attention.kernels import sparse_attention
from carnator_core.mini import model as mini
from carnator_core.mini import sample, text


@pytest.fixture(scope="module")
def model():
    return mini.load()


@torch.no_grad()
def predicted(model) -> torch.Tensor:
    x = sample.noise([3], 32)
    return sample.guided_x0(model, x, 0.6, text.encode(["two red balls"]), text.encode([""]), 2.0)


def test_dense_attention_in_the_models_place_changes_no_bit(model):
    plain, seen = predicted(model), []

    def attend(layer, dense, q, k, v, text=None):
        seen.append((layer, tuple(q.shape)))
        return dense(q, k, v)

    with backbones.find(model).attending(model, attend):
        assert torch.equal(predicted(model), plain)
    heads = model.config.num_attention_heads
    assert seen == [(layer, (2, heads, 320, 128)) for layer in range(len(model.blocks))]  # both branches in one batch
    assert torch.equal(predicted(model), plain)


def test_a_full_mask_is_dense_attention_and_a_sparse_one_is_not(model):
    plain = predicted(model)

    def masked(mask):
        def attend(layer, dense, q, k, v, text=None):
            return sparse_attention(q, k, v, mask)

        with backbones.find(model).attending(model, attend):
            return predicted(model)

    heads = model.config.num_attention_heads
    full = BlockMask.full(heads, (320, 320))
    assert (masked(full) - plain).abs().max() < 1e-3
    mass = torch.rand(heads, *full.shape, generator=torch.Generator().manual_seed(0))
    assert (masked(top_mask(mass, 0.3, full.block, full.tokens)) - plain).abs().max() > 1e-2


def test_the_models_own_attention_returns_after_an_error(model):
    before = [block.attn1.processor for block in model.blocks]

    def broken(*_, **__):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"), backbones.find(model).attending(model, broken):
        predicted(model)
    assert [block.attn1.processor for block in model.blocks] == before


def test_a_top_mask_keeps_the_share_that_was_asked_for():
    mass = torch.rand(2, 4, 20, generator=torch.Generator().manual_seed(1))
    mask = top_mask(mass, 0.25, (32, 16), (128, 320))
    assert (mask.keep.sum(-1) == 5).all()
    kept, lost = mass.masked_fill(~mask.keep, 2).amin(-1), mass.masked_fill(mask.keep, 0).amax(-1)
    assert (kept >= lost).all()
    with pytest.raises(ValueError, match="density"):
        top_mask(mass, 0, (32, 16), (128, 320))
