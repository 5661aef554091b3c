"""Key names of Wan transformers: the original release (which ComfyUI reads) and diffusers' port.

Only names differ; every tensor is the same. Works for any Wan 2.1 text-to-video transformer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

# (diffusers, original), outside the blocks and inside one
_OUTER = (
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("patch_embedding", "patch_embedding"),
    ("proj_out", "head.head"),
)
_BLOCK = (
    *((f"attn1.{d}", f"self_attn.{o}") for d, o in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))),
    *((f"attn2.{d}", f"cross_attn.{o}") for d, o in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))),
    *((f"{d}.norm_{x}", f"{o}.norm_{x}") for d, o in (("attn1", "self_attn"), ("attn2", "cross_attn")) for x in "qk"),
    ("norm2", "norm3"),  # the two releases number the norms differently
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
)
_EXACT = (("scale_shift_table", "head.modulation"),)
_BLOCK_EXACT = (("scale_shift_table", "modulation"),)


def _rename(state: Mapping[str, torch.Tensor], source: int) -> dict[str, torch.Tensor]:
    target = 1 - source
    outer = {pair[source]: pair[target] for pair in _OUTER}
    exact = {pair[source]: pair[target] for pair in _EXACT}
    block = {pair[source]: pair[target] for pair in _BLOCK}
    block_exact = {pair[source]: pair[target] for pair in _BLOCK_EXACT}
    out = {}
    for key, value in state.items():
        inside = re.fullmatch(r"(blocks\.\d+\.)(.+)", key)
        prefix, name = inside.groups() if inside else ("", key)
        whole, stems = (block_exact, block) if inside else (exact, outer)
        stem, _, suffix = name.rpartition(".")
        if name in whole:
            out[prefix + whole[name]] = value
        elif stem in stems:
            out[f"{prefix}{stems[stem]}.{suffix}"] = value
        else:
            raise KeyError(f"{key!r} is no key of a Wan 2.1 text-to-video transformer")
    return out


def to_original(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """diffusers' key names -> the original ones. KeyError on a key that Wan 2.1 text-to-video does not have."""
    return _rename(state, 0)


def from_original(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The original key names -> diffusers'. KeyError on a key that Wan 2.1 text-to-video does not have."""
    return _rename(state, 1)
