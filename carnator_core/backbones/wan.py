"""Wan in diffusers: token layout, taps that only read (forward pre-hooks), and self-attention in another's hands.

The latter stands in through diffusers' own attention processors and goes back to the model's when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from ..attention.choice import Dense
from ..grid import TokenGrid
from ..reuse.window import TokenWindow
from ..signature.taps import Taps, middle_layer

NAME = "wan"
PIPELINES = ("WanPipeline",)  # classes of diffusers that `pipelines.attach` drives


def takes(transformer: torch.nn.Module) -> bool:
    """Text-to-video Wan only: image conditioning changes what a latent holds."""
    return (
        type(transformer).__name__ == "WanTransformer3DModel" and getattr(transformer.config, "image_dim", None) is None
    )


def grid_of(transformer: torch.nn.Module, latent_shape: tuple[int, ...]) -> TokenGrid:
    return TokenGrid.of_latent(latent_shape, tuple(transformer.config.patch_size))


Attend = Callable[[int, Dense, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # layer, dense, q, k, v


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(1, s, heads * d) -> (heads, s, d)."""
    return x[0].unflatten(-1, (heads, -1)).transpose(0, 1)


def _rotated(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Wan's rotary position on (..., s, d); cosines and sines (1, s, 1, d), pairs side by side."""
    cos, sin = (r[0, :, 0, :].float() for r in rotary)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
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


class _SelfAttention:
    """A processor in the place of one block's own: `attend` gets what the softmax would see, (b, heads, s, d) each."""

    def __init__(self, layer: int, own: Callable, attend: Attend):
        self.layer, self.own, self.attend = layer, own, attend

    def __call__(self, attention, hidden, text=None, mask=None, rotary=None, **more):
        if text is not None or mask is not None or rotary is None or more or _is_parallel(self.own):
            return self.own(attention, hidden, text, mask, rotary, **more)
        q, k = attention.norm_q(attention.to_q(hidden)), attention.norm_k(attention.to_k(hidden))
        q, k, v = (x.unflatten(2, (attention.heads, -1)).transpose(1, 2) for x in (q, k, attention.to_v(hidden)))
        q, k = _rotated(q, rotary), _rotated(k, rotary)
        out = self.attend(self.layer, partial(_dense, self.own), q, k, v).transpose(1, 2).flatten(2, 3)
        return attention.to_out[1](attention.to_out[0](out.type_as(hidden)))


def _is_parallel(own: Callable) -> bool:
    return getattr(own, "_parallel_config", None) is not None


def _dense(own: Callable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The attention that diffusers would have computed, by the backend that is set for it."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return dispatch_attention_fn(q, k, v, backend=getattr(own, "_attention_backend", None)).transpose(1, 2)


@contextmanager
def attending(transformer: torch.nn.Module, attend: Attend) -> Iterator[None]:
    """Within the block, `attend(layer, dense, q, k, v)` answers every self-attention, q, k, v (b, heads, s, d).

    `dense(q, k, v)` is the attention that the model would have used. Cross-attention, masked attention and attention
    that is split over devices stay the model's own.
    """
    own = [block.attn1.processor for block in transformer.blocks]
    try:
        for layer, block in enumerate(transformer.blocks):
            block.attn1.processor = _SelfAttention(layer, own[layer], attend)
        yield
    finally:
        for block, processor in zip(transformer.blocks, own, strict=True):
            block.attn1.processor = processor


@contextmanager
def windowed(transformer: torch.nn.Module, window: TokenWindow) -> Iterator[None]:
    """Within the block, every transformer block goes through `window`."""

    def through(layer: int, own: Callable) -> Callable:
        def forward(hidden, text, temb, rotary):
            def run(hidden: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
                if index is None:
                    return own(hidden, text, temb, rotary)
                own_time = temb[:, index] if temb.ndim == 4 else temb  # Wan 2.2 5B has a time for each token
                return own(hidden, text, own_time, tuple(r[:, index] for r in rotary))

            return window.block(layer, hidden, run)

        return forward

    before = [block.__dict__.get("forward") for block in transformer.blocks]
    try:
        for layer, block in enumerate(transformer.blocks):
            block.forward = through(layer, block.forward)
        yield
    finally:
        for block, forward in zip(transformer.blocks, before, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward
