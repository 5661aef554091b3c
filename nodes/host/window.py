"""The core's token window in ComfyUI: the blocks of one prediction go through it by the host's own block hook."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...carnator_core.reuse.window import TokenWindow


def windowed(options: dict, window: TokenWindow) -> dict:
    """A copy of `model_options` for one prediction; the given options stay as they are."""
    from comfy.model_patcher import create_model_options_clone

    options = create_model_options_clone(options)
    inner = options["transformer_options"]
    inner["patches_replace"] = {**inner.get("patches_replace", {})}
    blocks = {("double_block", i): _through(window, i) for i in range(window.first, window.last + 1)}
    inner["patches_replace"]["dit"] = {**inner["patches_replace"].get("dit", {}), **blocks}
    return options


def _through(window: TokenWindow, layer: int) -> Callable[[dict, dict], dict]:
    def replacement(args: dict, extra: dict) -> dict:
        branches = tuple(args["transformer_options"].get("cond_or_uncond", ()))

        def run(hidden: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
            given = {**args, "img": hidden}
            if index is not None:
                given["pe"] = args["pe"][:, index]
                given["vec"] = _times(args["vec"], window.tokens, index)
            return extra["original_block"](given)["img"]

        return {"img": window.block(layer, args["img"], run, branches)}

    return replacement


def _times(vec: torch.Tensor, tokens: int, index: torch.Tensor) -> torch.Tensor:
    """The timestep embedding of the chosen tokens: one for all (b, 6, c), or one for each of n equal parts of a clip
    (b, n, 6, c), as Wan 2.2 5B has it."""
    if vec.ndim < 4 or vec.shape[1] == 1:
        return vec
    return vec.repeat_interleave(-(-tokens // vec.shape[1]), dim=1)[:, :tokens][:, index]
