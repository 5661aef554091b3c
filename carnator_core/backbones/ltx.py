"""LTX-Video in diffusers: visual tokens alone in self-attention, text in masked cross-attention."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ..grid import TokenGrid
from ..reuse.window import TokenWindow
from .common import Attend, ImageRotary, of_tokens, standing_in, through_window

NAME = "ltx"
PIPELINES: tuple[str, ...] = ()


def takes(transformer: torch.nn.Module) -> bool:
    return type(transformer).__name__ == "LTXVideoTransformer3DModel"


def grid_of(transformer: torch.nn.Module, latent_shape: tuple[int, ...]) -> TokenGrid:
    """Of a latent (..., T, H, W) before the pipeline packs it."""
    config = transformer.config
    return TokenGrid.of_latent(latent_shape, (config.patch_size_t, config.patch_size, config.patch_size))


def blocks_of(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    return list(transformer.transformer_blocks)


class _SelfAttention(ImageRotary):
    def begin(self, attention, given):
        from diffusers.models.transformers.transformer_ltx import apply_rotary_emb

        hidden, rotary = given["hidden_states"], given.get("image_rotary_emb")
        if any(given.get(name) is not None for name in ("encoder_hidden_states", "attention_mask")) or rotary is None:
            return None
        q, k = attention.norm_q(attention.to_q(hidden)), attention.norm_k(attention.to_k(hidden))
        qkv = apply_rotary_emb(q, rotary), apply_rotary_emb(k, rotary), attention.to_v(hidden)
        return tuple(x.unflatten(2, (attention.heads, -1)).transpose(1, 2) for x in qkv)


def attending(transformer: torch.nn.Module, attend: Attend) -> AbstractContextManager[None]:
    """Within the block, `attend` answers every self-attention. Cross-attention stays the model's own."""
    return standing_in([block.attn1 for block in blocks_of(transformer)], _SelfAttention, attend)


def _part(given: dict[str, Any], index: torch.Tensor) -> dict[str, Any]:
    rotary = tuple(r[:, index] for r in given["image_rotary_emb"])
    return {"image_rotary_emb": rotary, "temb": of_tokens(given["temb"], index)}


def windowed(
    transformer: torch.nn.Module, window: TokenWindow, below: Attend | None = None
) -> AbstractContextManager[None]:
    """Within the block, every transformer block and its attention go through `window`."""
    return through_window(blocks_of(transformer), window, _part, partial(attending, transformer), below)
