"""Wan in diffusers: token layout, taps that only read (forward pre-hooks), and self-attention in another's hands.

The latter stands in through diffusers' own attention processors and goes back to the model's when it is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from ..grid import TokenGrid
from ..reuse.window import TokenWindow
from ..signature.taps import Taps, middle_layer
from .common import Attend, StandIn, of_tokens, standing_in, through_window

NAME = "wan"
PIPELINES = ("WanPipeline",)  # classes of diffusers that `pipelines.attach` drives
REAL_WIDTHS = {"wan-1.3b": dict(num_attention_heads=12, ffn_dim=8960, num_layers=30)}  # for benchmarks without weights


def takes(transformer: torch.nn.Module) -> bool:
    """Text-to-video Wan only: image conditioning changes what a latent holds."""
    return (
        type(transformer).__name__ == "WanTransformer3DModel" and getattr(transformer.config, "image_dim", None) is None
    )


def grid_of(transformer: torch.nn.Module, latent_shape: tuple[int, ...]) -> TokenGrid:
    return TokenGrid.of_latent(latent_shape, tuple(transformer.config.patch_size))


def blocks_of(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    return list(transformer.blocks)


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(1, s, heads * d) -> (heads, s, d)."""
    return x[0].unflatten(-1, (heads, -1)).transpose(0, 1)


def _rotated(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Wan's rotary position on (..., s, d); cosines and sines (1, s, 1, d), pairs side by side."""
    cos, sin = (r[0, :, 0, :] for r in rotary)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def _argument(args: tuple, kwargs: dict, place: int, name: str):
    return kwargs[name] if name in kwargs else (args[place] if len(args) > place else None)


@contextmanager
def tapped(transformer: torch.nn.Module, taps: Taps, row: int = 0) -> Iterator[None]:
    """Within the block, `taps` sees batch row `row` of every forward's middle layer. Outputs do not change by a bit."""
    block = transformer.blocks[middle_layer(len(transformer.blocks))]

    def cross(attention, args, kwargs):
        hidden = _argument(args, kwargs, 0, "hidden_states")[row : row + 1]
        text = _argument(args, kwargs, 1, "encoder_hidden_states")[row : row + 1]
        q, k = attention.norm_q(attention.to_q(hidden)), attention.norm_k(attention.to_k(text))
        taps.read_cross(_heads(q, attention.heads), _heads(k, attention.heads))

    def own(attention, args, kwargs):
        hidden = _argument(args, kwargs, 0, "hidden_states")[row : row + 1]
        rotary = _argument(args, kwargs, 3, "rotary_emb")
        if rotary is None:
            return
        q, k = attention.norm_q(attention.to_q(hidden)), attention.norm_k(attention.to_k(hidden))
        taps.read_self(*(_rotated(_heads(x, attention.heads), rotary) for x in (q, k)))

    handles = [
        block.attn2.register_forward_pre_hook(cross, with_kwargs=True),
        block.attn1.register_forward_pre_hook(own, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _SelfAttention(StandIn):
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None, **more):
        given = dict(hidden_states=hidden_states, encoder_hidden_states=encoder_hidden_states, **more)
        return self.answer(attn, given | dict(attention_mask=attention_mask, rotary_emb=rotary_emb))

    def begin(self, attention, given):
        hidden, rotary = given["hidden_states"], given.get("rotary_emb")
        if any(given.get(name) is not None for name in ("encoder_hidden_states", "attention_mask")) or rotary is None:
            return None
        q, k = attention.norm_q(attention.to_q(hidden)), attention.norm_k(attention.to_k(hidden))
        q, k, v = (x.unflatten(2, (attention.heads, -1)) for x in (q, k, attention.to_v(hidden)))
        # rotated before heads and tokens change places, as in the model: kernels tell layouts apart, to the last bit
        q, k = (_rotated(x.transpose(1, 2), rotary).transpose(1, 2).contiguous() for x in (q, k))
        return tuple(x.transpose(1, 2) for x in (q, k, v))


def attending(transformer: torch.nn.Module, attend: Attend) -> AbstractContextManager[None]:
    """Within the block, `attend` answers every self-attention. Cross-attention stays the model's own."""
    return standing_in([block.attn1 for block in transformer.blocks], _SelfAttention, attend)


def _part(given: dict[str, Any], index: torch.Tensor) -> dict[str, Any]:
    time, rotary = given["temb"], tuple(r[:, index] for r in given["rotary_emb"])
    return {"rotary_emb": rotary, "temb": of_tokens(time, index) if time.ndim == 4 else time}  # Wan 2.2 5B


def windowed(
    transformer: torch.nn.Module, window: TokenWindow, below: Attend | None = None
) -> AbstractContextManager[None]:
    """Within the block, every transformer block and its attention go through `window`."""
    return through_window(blocks_of(transformer), window, _part, partial(attending, transformer), below)
