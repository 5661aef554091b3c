"""CogVideoX in diffusers: text and visual tokens in one sequence (text in front)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ..grid import TokenGrid
from ..reuse.window import TokenWindow
from .common import Attend, ImageRotary, standing_in, through_window

NAME = "cogvideox"
PIPELINES: tuple[str, ...] = ()


def takes(transformer: torch.nn.Module) -> bool:
    """Text-to-video only: image conditioning doubles the input channels."""
    config = getattr(transformer, "config", None)
    return type(transformer).__name__ == "CogVideoXTransformer3DModel" and config.in_channels == config.out_channels


def grid_of(transformer: torch.nn.Module, latent_shape: tuple[int, ...]) -> TokenGrid:
    """Of a latent (..., T, H, W); diffusers' own order for this family is (b, T, C, H, W)."""
    config = transformer.config
    return TokenGrid.of_latent(latent_shape, (config.patch_size_t or 1, config.patch_size, config.patch_size))


def blocks_of(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    return list(transformer.transformer_blocks)


class _JointAttention(ImageRotary):
    def begin(self, attention, given):
        from diffusers.models.embeddings import apply_rotary_emb

        hidden, text = given["hidden_states"], given["encoder_hidden_states"]
        if given.get("attention_mask") is not None:
            return None
        joint, rotary = torch.cat((text, hidden), dim=1), given.get("image_rotary_emb")
        layers = attention.to_q, attention.to_k, attention.to_v
        q, k, v = (layer(joint).unflatten(2, (attention.heads, -1)).transpose(1, 2) for layer in layers)
        q, k = (y if n is None else n(y) for y, n in ((q, attention.norm_q), (k, attention.norm_k)))
        if rotary is not None:
            place = text.shape[1]
            q, k = (torch.cat((y[:, :, :place], apply_rotary_emb(y[:, :, place:], rotary)), dim=2) for y in (q, k))
        return q, k, v

    def text(self, given, keys):
        return 0, given["encoder_hidden_states"].shape[1]

    def dense(self, given, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)  # this family's processor knows no back ends

    def end(self, attention, given, out):
        out = attention.to_out[1](attention.to_out[0](out.transpose(1, 2).flatten(2, 3)))
        place = given["encoder_hidden_states"].shape[1]
        return out[:, place:], out[:, :place]


def attending(transformer: torch.nn.Module, attend: Attend) -> AbstractContextManager[None]:
    """Within the block, `attend` answers every joint attention."""
    return standing_in([block.attn1 for block in blocks_of(transformer)], _JointAttention, attend)


def _part(given: dict[str, Any], index: torch.Tensor) -> dict[str, Any]:
    rotary = given.get("image_rotary_emb")
    return {} if rotary is None else {"image_rotary_emb": tuple(r[index] for r in rotary)}


def windowed(
    transformer: torch.nn.Module, window: TokenWindow, below: Attend | None = None
) -> AbstractContextManager[None]:
    """Within the block, every transformer block and its attention go through `window`; text is computed in full."""
    return through_window(blocks_of(transformer), window, _part, partial(attending, transformer), below)
