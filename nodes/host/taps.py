"""The host's attention during one prediction: taps that read queries and keys, and sparse attention in its place.

An override of the host's attention lets the host's own function run wherever nothing else was asked for; one that
another node has set (SageAttention and the like) stays in force below it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...carnator_core.attention.connectivity import Connectivity
from ...carnator_core.grid import TokenGrid
from ...carnator_core.signature.taps import Taps
from .setup import KEY


def watched(options: dict, watcher: Watcher) -> dict:
    """A copy of `model_options` for one prediction; the given options stay as they are."""
    from comfy.model_patcher import create_model_options_clone
    from comfy.patcher_extension import WrappersMP, add_wrapper_with_key

    options = create_model_options_clone(options)
    inner = options["transformer_options"]
    watcher.below = inner.get("optimized_attention_override")
    inner["optimized_attention_override"] = watcher.attention
    add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, watcher.forward, options, is_model_options=True)
    if watcher.taps is not None:
        add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, _branches(watcher.taps), options, is_model_options=True)
    return options


def _branches(taps: Taps) -> Callable:
    def wrapper(executor: Any, model: Any, conds: Any, x: Any, timestep: Any, options: dict) -> Any:
        out = executor(model, conds, x, timestep, options)
        if len(out) == 2 and all(c is not None for c in conds):
            taps.read_branches(out[0], out[1])
        return out

    return wrapper


class Watcher:
    """Watches the attentions of one prediction and counts a forward's, which tells the layer on every version of the
    host.

    `taps` reads the layer `middle` and the guidance branches. `sparse` records masks (`recording`) or attends with
    them. A subclass knows how a family lays out its tokens.
    """

    def __init__(self, grid: TokenGrid, middle: int, taps: Taps | None, sparse: Connectivity | None, recording: bool):
        self.grid, self.middle, self.taps, self.sparse, self.recording = grid, middle, taps, sparse, recording
        self.below: Callable | None = None  # the attention that another node has put in the host's place
        self.count = 0

    def forward(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Around one forward of the transformer."""
        self.count = 0
        return executor(*args, **kwargs)

    def attention(self, func: Callable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, *args, **kwargs):
        """In the attention's place, as the host calls it."""
        func = func if self.below is None else partial(self.below, func)

        def host(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return func(q, k, v, heads, *args, **kwargs)

        branches = (kwargs.get("transformer_options") or {}).get("cond_or_uncond", [0])
        own = self.is_own(q, k, kwargs)
        layer = self.count - (0 if own else 1)
        self.count += bool(own)
        if own is None or q.shape[0] % len(branches):
            return host(q, k, v)
        clips = q.shape[0] // len(branches)
        rows = {branch: place * clips for place, branch in enumerate(branches)}  # the first clip of each
        if self.taps is not None and layer == self.middle and 0 in rows:
            self.read(own, q[rows[0]], k[rows[0]], heads, masked=masked(args, kwargs))
        if self.sparse is None or not own or masked(args, kwargs):  # block masks know nothing of padded keys
            return host(q, k, v)
        if self.recording:
            for branch, row in rows.items():
                self.record(layer, branch, q[row], k[row], heads)
            return host(q, k, v)
        return self.sparsely(layer, [b for b in branches for _ in range(clips)], host, q, k, v)

    def is_own(self, q: torch.Tensor, k: torch.Tensor, given: dict) -> bool | None:
        """Whether this is one layer's attention of the video's tokens to each other; None for what is not known."""
        raise NotImplementedError

    def read(self, own: bool, q: torch.Tensor, k: torch.Tensor, heads: int, masked: bool) -> None:
        """Hand one clip's queries and keys to the taps."""
        raise NotImplementedError

    def record(self, layer: int, branch: int, q: torch.Tensor, k: torch.Tensor, heads: int) -> None:
        raise NotImplementedError

    def sparsely(
        self, layer: int, branches: list[int], host: Callable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        raise NotImplementedError


def masked(args: tuple, kwargs: dict) -> bool:
    """Whether a call of the host's attention has a mask; the arguments behind `heads`."""
    return (args[0] if args else kwargs.get("mask")) is not None


def _split(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(s, heads * d) -> (heads, s, d)."""
    return x.unflatten(-1, (heads, -1)).transpose(0, 1)


class ApartWatcher(Watcher):
    """The video's tokens attend to each other, then to the text: q, k, v (b, s, heads * d)."""

    def is_own(self, q, k, given):
        return q.shape[1] == k.shape[1] == self.grid.tokens if q.ndim == 3 else None

    def read(self, own, q, k, heads, masked):
        q, k = _split(q, heads), _split(k, heads)
        if own:
            self.taps.read_self(q, k)
        else:  # padding takes its share of Wan's attention; where a mask hides it, it has none
            self.taps.read_cross(q, k[:, : self.taps.rows] if masked else k)

    def record(self, layer, branch, q, k, heads):
        self.sparse.record(layer, branch, _split(q, heads), _split(k, heads))

    def sparsely(self, layer, branches, host, q, k, v):
        return self.sparse.attend(layer, branches, host, q, k, v)


class JointWatcher(Watcher):
    """The video's tokens and behind them the text's in one attention: q, k, v (b, heads, s, d), out (b, s, heads * d).

    Attentions over the text alone come before.
    """

    text = 0  # tokens of it in this forward

    def forward(self, executor, *args, **kwargs):
        context = args[2] if len(args) > 2 else kwargs["context"]
        self.text = context.shape[1]
        return super().forward(executor, *args, **kwargs)

    def is_own(self, q, k, given):
        joint = q.ndim == 4 and given.get("skip_reshape") and q.shape[2] == k.shape[2] == self.grid.tokens + self.text
        return True if joint else None

    def read(self, own, q, k, heads, masked):
        tokens = self.grid.tokens
        self.taps.read_self(q[:, :tokens], k[:, :tokens])
        self.taps.read_cross(q[:, :tokens], k[:, tokens:][:, : self.taps.rows if masked else self.text])

    def record(self, layer, branch, q, k, heads):
        self.sparse.record(layer, branch, q, k, text=(self.grid.tokens, q.shape[1]))

    def sparsely(self, layer, branches, host, q, k, v):
        def dense(q, k, v):
            return host(q, k, v).unflatten(-1, (q.shape[1], -1)).transpose(1, 2)

        return self.sparse.attend(layer, branches, dense, q, k, v).transpose(1, 2).flatten(2)
