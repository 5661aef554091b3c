"""The core's token window in ComfyUI: the blocks of one prediction go through it by the host's own block hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ...carnator_core.reuse.window import TokenWindow
from .taps import masked

Key = tuple[str, int]  # of the host's block hook
Part = Callable[[dict[str, Any], torch.Tensor, int], dict[str, Any]]
"""part(args, index, tokens): those of the hook's arguments, "img" apart, that change when of all `tokens` of the video
only the ones in `index` are computed."""


def windowed(options: dict, window: TokenWindow, blocks: Sequence[Key], part: Part, tokens: int) -> dict:
    """A copy of `model_options` for one prediction; the given options stay as they are."""
    from comfy.model_patcher import create_model_options_clone

    options = create_model_options_clone(options)
    inner = options["transformer_options"]
    inner["patches_replace"] = {**inner.get("patches_replace", {})}
    joint = _Joint(tokens, any(kind == "single_block" for kind, _ in blocks))
    inside = {blocks[i]: _through(window, i, blocks[i], part, joint) for i in range(window.first, window.layers)}
    inner["patches_replace"]["dit"] = {**inner["patches_replace"].get("dit", {}), **inside}
    below = inner.get("optimized_attention_override")
    inner["optimized_attention_override"] = _attention(window, joint, below)
    return options


class _Joint:
    """Where the text lies in a model whose blocks attend to it and the video's tokens in one sequence, text behind;
    such a model has single blocks."""

    def __init__(self, tokens: int, is_joint: bool):
        self.tokens, self.is_joint = tokens, is_joint
        self.text = 0  # tokens of it in the sequence

    def enter(self, positions: Any) -> None:
        """Positions of a joint sequence, (b, 1, s, ...), are told of the video's tokens and of the text."""
        if self.is_joint:
            self.text = positions.shape[2] - self.tokens

    def of_keys(self, keys: int) -> tuple[int, int] | None:
        """Which of so many keys are text."""
        return (keys - self.text, keys) if self.text else None


def _attention(window: TokenWindow, joint: _Joint, below: Callable | None) -> Callable:
    """In the place of the host's attention; `below` is what stood there before."""

    def attention(func: Callable, q, k, v, heads: int, *args, **kwargs) -> torch.Tensor:
        func = func if below is None else partial(below, func)

        def host(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return func(q, k, v, heads, *args, **kwargs)

        return window.attend(host, q, k, v, joint.of_keys(k.shape[-2]), known=not masked(args, kwargs))

    return attention


def _through(window: TokenWindow, layer: int, key: Key, part: Part, joint: _Joint) -> Callable[[dict, dict], dict]:
    kind, _ = key

    def replacement(args: dict, extra: dict) -> dict:
        branches = tuple(args["transformer_options"].get("cond_or_uncond", ()))
        joint.enter(args["pe"])
        behind = joint.text if kind == "single_block" else 0  # in one tensor with the video's tokens
        video, text = args["img"].tensor_split((args["img"].shape[1] - behind,), dim=1)
        out: dict[str, Any] = {}

        def run(hidden: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
            changed = {} if index is None else part(args, index, joint.tokens)
            given = torch.cat((hidden, text), dim=1) if behind else hidden
            out.update(extra["original_block"]({**args, **changed, "img": given}))
            return out["img"][:, : hidden.shape[1]]

        hidden = window.block(layer, video, run, branches)
        if behind:
            hidden = torch.cat((hidden, out["img"][:, -behind:]), dim=1)
        return {**out, "img": hidden}

    return replacement


def part_of_wan(args: dict, index: torch.Tensor, tokens: int) -> dict:
    return {"pe": args["pe"][:, index], "vec": _times(args["vec"], tokens, index)}


def part_of_ltx(args: dict, index: torch.Tensor, tokens: int) -> dict:
    """Positions are (cosines, sines), each (..., tokens, d), and in later versions how to apply them."""
    positions = tuple(p[..., index, :] if torch.is_tensor(p) else p for p in args["pe"])
    vec = args["vec"]
    return {"pe": positions, "vec": vec if vec.shape[1] == 1 else vec[:, index]}


def part_of_hunyuan(args: dict, index: torch.Tensor, tokens: int) -> dict:
    """Positions (b, 1, s, ...) are of the video's tokens and of the text behind them. A model with a mask computes no
    region."""
    seen = torch.cat((index, torch.arange(tokens, args["pe"].shape[2], device=index.device)))
    return {"pe": args["pe"][:, :, seen]}


def _times(vec: torch.Tensor, tokens: int, index: torch.Tensor) -> torch.Tensor:
    """The timestep embedding of the chosen tokens: one for all (b, 6, c), or one for each of n equal parts of a clip
    (b, n, 6, c), as Wan 2.2 5B has it."""
    if vec.ndim < 4 or vec.shape[1] == 1:
        return vec
    return vec.repeat_interleave(-(-tokens // vec.shape[1]), dim=1)[:, :tokens][:, index]
