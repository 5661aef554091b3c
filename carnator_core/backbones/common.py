"""What all backbones share: blocks and attention that something stands in for, and their return afterwards.

A backbone file says where its blocks are, what of a block's arguments belongs to single tokens, and what its attention
hands to the softmax; the rest is here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from ..attention.choice import Dense
from ..reuse.context import Range
from ..reuse.window import TokenWindow


class Attend(Protocol):
    """Answers one self-attention: q, k, v (b, heads, s, d) as the softmax sees them, the same layout back.

    `dense(q, k, v)` is the attention that the model would have used; `text` tells which keys of a joint
    sequence are text.
    """

    def __call__(
        self, layer: int, dense: Dense, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, text: Range | None = None
    ) -> torch.Tensor: ...


def dispatched(own: Callable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention by the back end that is set on diffusers' own processor; (b, heads, s, d)."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return dispatch_attention_fn(q, k, v, backend=getattr(own, "_attention_backend", None)).transpose(1, 2)


class StandIn:
    """A processor in the place of an attention's own.

    A subclass has the `__call__` of its family's processors (diffusers reads its signature) and hands its arguments to
    `answer`; its `begin` and `end` do what is around the softmax. Whatever is not known (masks, attention split over
    devices) goes to the model's own processor.
    """

    def __init__(self, layer: int, own: Callable, attend: Attend):
        self.layer, self.own, self.attend = layer, own, attend

    def begin(self, attention: Any, given: dict[str, Any]) -> tuple[torch.Tensor, ...] | None:
        """q, k, v (b, heads, s, d), or None for what is not known."""
        raise NotImplementedError

    def end(self, attention: Any, given: dict[str, Any], out: torch.Tensor) -> Any:
        """What the processor returns, from the attention's output (b, heads, s, d); here of visual tokens alone."""
        out = out.transpose(1, 2).flatten(2, 3).to(given["hidden_states"].dtype)
        return attention.to_out[1](attention.to_out[0](out))

    def text(self, given: dict[str, Any], keys: int) -> Range | None:
        """Which keys are text."""
        return None

    def answer(self, attention: Any, given: dict[str, Any]) -> Any:
        """The processor's work; `given` are its arguments by name."""
        parallel = getattr(self.own, "_parallel_config", None) is not None
        qkv = None if parallel else self.begin(attention, given)
        if qkv is None:
            return self.own(attention, **given)
        out = self.attend(self.layer, partial(self.dense, given), *qkv, text=self.text(given, qkv[1].shape[2]))
        return self.end(attention, given, out)

    def dense(self, given: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dispatched(self.own, q, k, v)


class ImageRotary(StandIn):
    """With the arguments of most families' processors."""

    def __call__(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None, **more
    ):
        given = dict(hidden_states=hidden_states, encoder_hidden_states=encoder_hidden_states, **more)
        return self.answer(attn, given | dict(attention_mask=attention_mask, image_rotary_emb=image_rotary_emb))


@contextmanager
def standing_in(attentions: Sequence[Any], kind: type[StandIn], attend: Attend) -> Iterator[None]:
    """Within the block, `attend` answers these attentions, in the order of the layers."""
    own = [attention.processor for attention in attentions]
    try:
        for layer, attention in enumerate(attentions):
            attention.processor = kind(layer, own[layer], attend)
        yield
    finally:
        for attention, processor in zip(attentions, own, strict=True):
            attention.processor = processor


Part = Callable[[dict[str, Any], torch.Tensor], dict[str, Any]]


def _over(window: TokenWindow, below: Attend | None) -> Attend:
    """Attention through a window, over another's attention or the model's own."""

    def attend(layer, dense, q, k, v, text=None):
        inner = dense if below is None else partial(below, layer, dense, text=text)
        return window.attend(inner, q, k, v, text)

    return attend


@contextmanager
def through_window(
    blocks: Sequence[torch.nn.Module],
    window: TokenWindow,
    part: Part,
    attending: Callable[[Attend], AbstractContextManager[None]],
    below: Attend | None = None,
) -> Iterator[None]:
    """Within the block, these transformer blocks go through `window`, in this order, and their attention, which
    `attending` puts in another's hands, too; over `below` or the model's own.

    `part(given, index)` gives those of a block's arguments that change when only the tokens in `index` are computed,
    `hidden_states` apart. A block may return its text stream beside the hidden states; that is computed in full.
    """

    def wrapped(layer: int, own: Callable) -> Callable:
        signature = inspect.signature(own)

        def forward(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            given, beside = dict(bound.arguments), []

            def run(hidden: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
                changed = {} if index is None else part(given, index)
                bound.arguments.update({**given, **changed, "hidden_states": hidden})
                out = own(*bound.args, **bound.kwargs)
                if not isinstance(out, tuple):
                    return out
                beside.extend(out[1:])
                return out[0]

            hidden = window.block(layer, given["hidden_states"], run)
            return (hidden, *beside) if beside else hidden

        return forward

    before = [block.__dict__.get("forward") for block in blocks]
    try:
        for layer, block in enumerate(blocks):
            block.forward = wrapped(layer, block.forward)
        with attending(_over(window, below)):
            yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward


def of_tokens(time: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A timestep embedding (b, n, ...): the chosen tokens' own where it has one for each, else as it is."""
    return time[:, index] if time.shape[1] > 1 else time
