"""Taps in ComfyUI: an attention override that reads queries and keys and then lets the host's own attention run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...carnator_core.signature.taps import Taps, middle_layer
from .setup import KEY


def tapped_options(options: dict, taps: Taps, layers: int) -> dict:
    """A copy of `model_options` under which one prediction is read; the given options stay as they are."""
    from comfy.model_patcher import create_model_options_clone
    from comfy.patcher_extension import WrappersMP, add_wrapper_with_key

    options = create_model_options_clone(options)
    reader = _Reader(taps, middle_layer(layers))
    options["transformer_options"]["optimized_attention_override"] = reader.attention
    add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, reader.forward, options, is_model_options=True)
    add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, _branches(taps), options, is_model_options=True)
    return options


def _branches(taps: Taps) -> Callable:
    def wrapper(executor: Any, model: Any, conds: Any, x: Any, timestep: Any, options: dict) -> Any:
        out = executor(model, conds, x, timestep, options)
        if len(out) == 2 and all(c is not None for c in conds):
            taps.read_branches(out[0], out[1])
        return out

    return wrapper


class _Reader:
    """Counts the self-attentions of one forward, which tells the layer on every version of the host."""

    def __init__(self, taps: Taps, layer: int):
        self.taps, self.layer, self.count = taps, layer, 0

    def forward(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Around one forward of the transformer."""
        self.count = 0
        return executor(*args, **kwargs)

    def attention(self, func: Callable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, *args, **kwargs):
        """In the attention's place: q, k, v (b, s, heads * d) on Wan."""
        own = q.shape[1] == k.shape[1] == self.taps.grid.tokens
        layer = self.count - (0 if own else 1)
        self.count += own
        if layer == self.layer and q.ndim == 3:
            row = self._row(kwargs.get("transformer_options"), q.shape[0])
            if row is not None:
                parts = (x[row].unflatten(-1, (heads, -1)).transpose(0, 1) for x in (q, k))
                (self.taps.read_self if own else self.taps.read_cross)(*parts)
        return func(q, k, v, heads, *args, **kwargs)

    @staticmethod
    def _row(options: dict | None, rows: int) -> int | None:
        """The batch row of the first clip's conditional branch (0 in `cond_or_uncond`), or None without one."""
        branches = (options or {}).get("cond_or_uncond", [0])
        return branches.index(0) * (rows // len(branches)) if 0 in branches else None
