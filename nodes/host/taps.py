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
from ...carnator_core.signature.taps import Taps, middle_layer
from .setup import KEY


def watched(
    options: dict,
    grid: TokenGrid,
    layers: int,
    taps: Taps | None = None,
    sparse: Connectivity | None = None,
    recording: bool = False,
) -> dict:
    """A copy of `model_options` for one prediction; the given options stay as they are.

    `taps` reads the middle layer and the guidance branches. `sparse` records masks (`recording`) or attends with them.
    """
    from comfy.model_patcher import create_model_options_clone
    from comfy.patcher_extension import WrappersMP, add_wrapper_with_key

    options = create_model_options_clone(options)
    inner = options["transformer_options"]
    below = inner.get("optimized_attention_override")
    watcher = _Watcher(grid, middle_layer(layers), taps, sparse, recording, below)
    inner["optimized_attention_override"] = watcher.attention
    add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, watcher.forward, options, is_model_options=True)
    if taps is not None:
        add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, _branches(taps), options, is_model_options=True)
    return options


def _branches(taps: Taps) -> Callable:
    def wrapper(executor: Any, model: Any, conds: Any, x: Any, timestep: Any, options: dict) -> Any:
        out = executor(model, conds, x, timestep, options)
        if len(out) == 2 and all(c is not None for c in conds):
            taps.read_branches(out[0], out[1])
        return out

    return wrapper


def _split(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(s, heads * d) -> (heads, s, d)."""
    return x.unflatten(-1, (heads, -1)).transpose(0, 1)


class _Watcher:
    """Counts the self-attentions of one forward, which tells the layer on every version of the host."""

    def __init__(
        self,
        grid: TokenGrid,
        middle: int,
        taps: Taps | None,
        sparse: Connectivity | None,
        recording: bool,
        below: Callable | None,
    ):
        self.grid, self.middle, self.taps, self.sparse, self.recording = grid, middle, taps, sparse, recording
        self.below, self.count = below, 0

    def forward(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Around one forward of the transformer."""
        self.count = 0
        return executor(*args, **kwargs)

    def attention(self, func: Callable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, *args, **kwargs):
        """In the attention's place: q, k, v (b, s, heads * d) on Wan."""
        func = func if self.below is None else partial(self.below, func)
        own = q.shape[1] == k.shape[1] == self.grid.tokens
        layer = self.count - (0 if own else 1)
        self.count += own
        branches = (kwargs.get("transformer_options") or {}).get("cond_or_uncond", [0])
        clips = q.shape[0] // len(branches)
        if q.ndim != 3 or clips * len(branches) != q.shape[0]:
            return func(q, k, v, heads, *args, **kwargs)
        if self.taps is not None and layer == self.middle and 0 in branches:
            row = branches.index(0) * clips  # the first clip's conditional branch
            (self.taps.read_self if own else self.taps.read_cross)(_split(q[row], heads), _split(k[row], heads))
        masked = (args[0] if args else kwargs.get("mask")) is not None  # block masks know nothing of padded keys
        if self.sparse is None or not own or masked:
            return func(q, k, v, heads, *args, **kwargs)
        if self.recording:
            for place, branch in enumerate(branches):
                self.sparse.record(layer, branch, _split(q[place * clips], heads), _split(k[place * clips], heads))
            return func(q, k, v, heads, *args, **kwargs)

        def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return func(q, k, v, heads, *args, **kwargs)

        return self.sparse.attend(layer, [b for b in branches for _ in range(clips)], dense, q, k, v)
