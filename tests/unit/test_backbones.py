"""Every backbone on a tiny random model of its own family: what stands in changes nothing it should not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    HunyuanVideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    WanTransformer3DModel,
)

from carnator_core import backbones
from carnator_core.attention.blocks import BlockMask, find_mask
from carnator_core.attention.kernels import sparse_attention
from carnator_core.reuse.window import TokenWindow

LATENT = (3, 8, 8)  # T, h, w
TEXT = 6


@dataclass
class Tiny:
    """A model, the arguments of one forward, its tokens, and how its output is laid out in tokens."""

    model: torch.nn.Module
    given: dict
    grid: tuple[int, int, int]
    joint: bool = False

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        return self.model(**self.given, return_dict=False)[0]

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def wan() -> Tiny:
    config = dict(patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, text_dim=16, freq_dim=16)
    model = WanTransformer3DModel(**config, in_channels=4, out_channels=4, ffn_dim=32, num_layers=6)
    given = dict(hidden_states=rand(2, 4, *LATENT), encoder_hidden_states=rand(2, TEXT, 16))
    return Tiny(model, given | {"timestep": torch.tensor([500.0, 500.0])}, (3, 4, 4))


def ltx() -> Tiny:
    config = dict(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32)
    model = LTXVideoTransformer3DModel(**config, num_layers=6, caption_channels=16)
    given = dict(hidden_states=rand(2, 3 * 64, 4), encoder_hidden_states=rand(2, TEXT, 16))
    given |= dict(encoder_attention_mask=torch.tensor([[1] * 4 + [0] * 2] * 2), num_frames=3, height=8, width=8)
    return Tiny(model, given | {"timestep": torch.tensor([500.0, 500.0])}, LATENT)


def hunyuan() -> Tiny:
    config = dict(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, text_embed_dim=16)
    config |= dict(num_layers=3, num_single_layers=3, num_refiner_layers=1, patch_size=2, patch_size_t=1)
    model = HunyuanVideoTransformer3DModel(**config, pooled_projection_dim=8, rope_axes_dim=(4, 6, 6))
    given = dict(hidden_states=rand(2, 4, *LATENT), encoder_hidden_states=rand(2, TEXT, 16))
    given |= dict(encoder_attention_mask=torch.tensor([[1] * 4 + [0] * 2] * 2), pooled_projections=rand(2, 8))
    given |= dict(timestep=torch.tensor([500, 500]), guidance=torch.tensor([6000.0, 6000.0]))
    return Tiny(model, given, (3, 4, 4), joint=True)


def cogvideox() -> Tiny:
    config = dict(num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8)
    config |= dict(text_embed_dim=16, num_layers=6, sample_width=8, sample_height=8, sample_frames=9, patch_size=2)
    model = CogVideoXTransformer3DModel(**config, temporal_compression_ratio=4, max_text_seq_length=TEXT)
    given = dict(hidden_states=rand(2, 3, 4, 8, 8), encoder_hidden_states=rand(2, TEXT, 16))
    return Tiny(model, given | {"timestep": torch.tensor([500, 500])}, (3, 4, 4), joint=True)


FAMILIES = {"wan": wan, "ltx": ltx, "hunyuan": hunyuan, "cogvideox": cogvideox}


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request) -> Tiny:
    torch.manual_seed(0)
    made = FAMILIES[request.param]()
    with torch.no_grad():
        for parameter in made.model.parameters():  # none of the zero starts, so that every layer counts
            parameter.copy_(torch.randn_like(parameter) * parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.3)
    made.model.eval()
    assert backbones.find(made.model).NAME == request.param
    return made


def test_the_token_grid_is_the_models(tiny):
    grid = backbones.find(tiny.model).grid_of(tiny.model, (1, 4, *LATENT))
    assert (grid.t, grid.h, grid.w) == tiny.grid


def test_dense_attention_in_its_place_changes_next_to_nothing_and_sees_every_layer(tiny):
    plain, seen = tiny(), []

    def attend(layer, dense, q, k, v, text=None):
        seen.append((layer, q.shape[2], k.shape[2], text))
        return dense(q, k, v)

    with backbones.find(tiny.model).attending(tiny.model, attend):
        found = tiny()
    assert (found - plain).abs().max() <= 1e-5 * plain.abs().max()
    assert [layer for layer, *_ in seen] == list(range(6))
    for _, queries, keys, text in seen:
        assert queries == tiny.tokens + (TEXT if tiny.joint else 0)
        if not tiny.joint:
            assert keys == queries and text is None
        else:  # padded text is no key, and text is told
            start, stop = text
            assert keys - (stop - start) == tiny.tokens and 4 <= stop - start <= TEXT
    assert torch.equal(tiny(), plain)  # and the model is its own again


def test_a_full_mask_is_dense_and_text_stays_in_a_sparse_one(tiny):
    def full(layer, dense, q, k, v, text=None):
        return sparse_attention(q, k, v, BlockMask.full(q.shape[1], (q.shape[2], k.shape[2])))

    def sparse(layer, dense, q, k, v, text=None):
        mask = find_mask(q[0], k[0], kept=0.3, floor=0.0, block=(16, 4), text=(text,) if text else ())
        if text:
            assert mask.keep[..., text[0] // 4 : -(-text[1] // 4)].all()
        assert mask.density < 1
        return sparse_attention(q, k, v, mask)

    plain = tiny()
    for attend, same in ((full, True), (sparse, False)):
        with backbones.find(tiny.model).attending(tiny.model, attend):
            assert ((tiny() - plain).abs().max() < 1e-4 * plain.abs().max()) == same


def test_all_tokens_in_any_order_give_the_full_step(tiny):
    plain, window, backbone = tiny(), TokenWindow(6), backbones.find(tiny.model)
    assert len(backbone.blocks_of(tiny.model)) == 6
    with backbone.windowed(tiny.model, window):
        window.begin(None)
        assert torch.equal(tiny(), plain)
        window.begin(torch.randperm(tiny.tokens, generator=torch.Generator().manual_seed(1)))
        found = tiny()
    assert window.was_partial and (found - plain).abs().max() < 1e-4 * plain.abs().max()
    assert torch.equal(tiny(), plain)


def test_half_of_the_tokens_computed_leave_a_clip_near_the_full_one_and_not_equal(tiny):
    plain, window, backbone = tiny(), TokenWindow(6), backbones.find(tiny.model)
    with backbone.windowed(tiny.model, window):
        window.begin(None)
        tiny()
        window.begin(torch.arange(0, tiny.tokens, 2))
        found = tiny()
    error = (found - plain).pow(2).mean() / plain.var()
    assert 0 < error < 0.2


def test_an_error_inside_leaves_the_model_as_it_was(tiny):
    backbone = backbones.find(tiny.model)
    plain = tiny()

    def broken(*_, **__):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"), backbone.attending(tiny.model, broken):
        tiny()
    window = TokenWindow(6)
    window.block = broken
    with pytest.raises(RuntimeError, match="out of memory"), backbone.windowed(tiny.model, window):
        tiny()
    assert torch.equal(tiny(), plain)
    assert all("forward" not in block.__dict__ for block in backbone.blocks_of(tiny.model))
