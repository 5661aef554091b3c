"""The back end for CUDA: PyTorch's flex_attention, compiled once. Untested: no GPU was at hand.

It is used only where a small compiled attention agrees with the gathering one, and only when it measures faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from .blocks import BlockMask


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention as flex

    return torch.compile(flex, dynamic=False)


def _table(masks: Sequence[BlockMask], device: torch.device) -> Any:
    """flex_attention's own block mask: per query block the number and the indices of its key blocks."""
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    keep = torch.stack([mask.keep for mask in masks]).to(device)
    counts = keep.sum(-1).int()
    indices = keep.int().argsort(dim=-1, descending=True, stable=True).int()
    block = masks[0].block
    # The kept blocks are whole ones, so no rule for single elements is needed.
    none = torch.zeros_like(counts)
    return FlexMask.from_kv_blocks(none, indices, counts, indices, BLOCK_SIZE=block, seq_lengths=masks[0].tokens)


def flex_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Sequence[BlockMask], scale: float):
    """(b, heads, tokens, d), one mask for each element of the batch. RuntimeError where it cannot run."""
    reason = why_not(q.device)
    if reason:
        raise RuntimeError(reason)
    return _compiled()(q, k, v, block_mask=_table(masks, q.device), scale=scale)


@cache
def why_not(device: torch.device) -> str:
    """Why this back end cannot be used on a device, or an empty string. Compiles once."""
    if device.type != "cuda":
        return f"flex_attention is used on CUDA only, not on {device.type}"
    from .kernels import sparse_attention  # only here: it imports from this file

    try:
        draw = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 2, 300, 64, generator=draw).to(device, torch.float16) for _ in range(3))
        keep = torch.rand(2, 3, 5, generator=draw) < 0.5
        keep[:, :, 0] = True
        mask = BlockMask(keep, (128, 64), (300, 300))
        found = _compiled()(q, k, v, block_mask=_table([mask], device))
        if not torch.allclose(found, sparse_attention(q, k, v, mask), atol=1e-2):
            return "flex_attention compiled, but its result differs from the gathering back end"
    except Exception as error:  # a compiler can fail in any way, and the others remain
        return f"flex_attention does not compile here: {type(error).__name__}: {str(error)[:200]}"
    return ""
