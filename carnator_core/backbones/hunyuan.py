"""HunyuanVideo in diffusers: visual tokens and text in one sequence (text behind), two kinds of blocks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ..grid import TokenGrid
from ..reuse.window import TokenWindow
from .common import Attend, ImageRotary, standing_in, through_window

NAME = "hunyuan"
PIPELINES: tuple[str, ...] = ()


def takes(transformer: torch.nn.Module) -> bool:
    """Text-to-video only: what starts from a picture replaces tokens of the first frame."""
    return (
        type(transformer).__name__ == "HunyuanVideoTransformer3DModel"
        and transformer.config.image_condition_type is None
    )


def grid_of(transformer: torch.nn.Module, latent_shape: tuple[int, ...]) -> TokenGrid:
    config = transformer.config
    return TokenGrid.of_latent(latent_shape, (config.patch_size_t, config.patch_size, config.patch_size))


def blocks_of(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    return [*transformer.transformer_blocks, *transformer.single_transformer_blocks]


def _visible(mask: torch.Tensor) -> int | None:
    """How many keys every row sees, if that is one run from the first; None for any other mask. (b, 1, 1, s), bool."""
    counts = mask.flatten(1).sum(1)
    count = int(counts[0])
    return count if bool((counts == count).all()) and bool(mask[..., :count].all()) else None


class _JointAttention(ImageRotary):
    """Padded text stands last, so it is cut off the keys; its own rows attend to what is visible, as in the model."""

    def begin(self, attention, given):
        hidden, text, mask = (given.get(n) for n in ("hidden_states", "encoder_hidden_states", "attention_mask"))
        if text is None or given.get("image_rotary_emb") is None or (mask is not None and _visible(mask) is None):
            return None
        own = attention.to_q, attention.to_k, attention.to_v, attention.norm_q, attention.norm_k
        added = own if attention.add_q_proj is None else self._added(attention)
        parts = [self._projected(attention, hidden, own, given["image_rotary_emb"])]
        parts.append(self._projected(attention, text, added, None))
        q, k, v = (torch.cat(pair, dim=1).transpose(1, 2) for pair in zip(*parts, strict=True))
        seen = k.shape[2] if mask is None else _visible(mask)
        return q, k[:, :, :seen], v[:, :, :seen]

    @staticmethod
    def _added(attention):
        norms = attention.norm_added_q, attention.norm_added_k
        return attention.add_q_proj, attention.add_k_proj, attention.add_v_proj, *norms

    @staticmethod
    def _projected(attention, x, layers, rotary):
        from diffusers.models.embeddings import apply_rotary_emb

        to_q, to_k, to_v, norm_q, norm_k = layers
        q, k, v = (layer(x).unflatten(2, (attention.heads, -1)) for layer in (to_q, to_k, to_v))
        q, k = (y if norm is None else norm(y) for y, norm in ((q, norm_q), (k, norm_k)))
        if rotary is not None:
            q, k = (apply_rotary_emb(y, rotary, sequence_dim=1) for y in (q, k))
        return q, k, v

    def text(self, given, keys):
        return given["hidden_states"].shape[1], keys

    def end(self, attention, given, out):
        out = out.transpose(1, 2).flatten(2, 3).to(given["hidden_states"].dtype)
        length = given["encoder_hidden_states"].shape[1]
        hidden, text = out[:, :-length], out[:, -length:]
        if getattr(attention, "to_out", None) is not None:
            hidden = attention.to_out[1](attention.to_out[0](hidden))
        if getattr(attention, "to_add_out", None) is not None:
            text = attention.to_add_out(text)
        return hidden, text


def attending(transformer: torch.nn.Module, attend: Attend) -> AbstractContextManager[None]:
    """Within the block, `attend` answers every joint attention; keys of padded text are left out."""
    return standing_in([block.attn for block in blocks_of(transformer)], _JointAttention, attend)


def _part(given: dict[str, Any], index: torch.Tensor) -> dict[str, Any]:
    name = "freqs_cis" if "freqs_cis" in given else "image_rotary_emb"
    changed: dict[str, Any] = {name: tuple(r[index] for r in given[name])}
    mask = given.get("attention_mask")
    if mask is not None:
        visual = mask.shape[-1] - given["encoder_hidden_states"].shape[1]
        changed["attention_mask"] = torch.cat((mask[..., :visual][..., index], mask[..., visual:]), -1)
    return changed


def windowed(
    transformer: torch.nn.Module, window: TokenWindow, below: Attend | None = None
) -> AbstractContextManager[None]:
    """Within the block, every transformer block and its attention go through `window`; text is computed in full."""
    return through_window(blocks_of(transformer), window, _part, partial(attending, transformer), below)
