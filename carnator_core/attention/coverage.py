"""Coverage: how much of an attention's true softmax mass lies inside the blocks that a mask keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .blocks import ROW_SHARE, BlockMask, block_mass, check_pair, sample_rows

SEED = 1  # other rows than those from which `find_mask` made the mask, or its own coverage would flatter it


@dataclass(frozen=True)
class Coverage:
    """Shares in [0, 1]: one per head, their mean, and the worst head's."""

    heads: tuple[float, ...]
    mean: float
    worst: float


@torch.no_grad()
def coverage(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: BlockMask,
    *,
    rows: float = ROW_SHARE,
    seed: int = SEED,
    scale: float | None = None,
) -> Coverage:
    """The coverage of a mask (its own or a donor's) on q (heads, query tokens, d) and k (heads, key tokens, d).

    Measured on sampled query rows, each standing for its block's length; `rows`=1 takes all. ValueError when the mask
    is of another shape.
    """
    check_pair(q, k)
    found = (q.shape[0], (q.shape[1], k.shape[1]))
    if found != (mask.heads, mask.tokens):
        raise ValueError(f"the mask is of {mask.heads} heads and {mask.tokens} tokens, not {found[0]} and {found[1]}")
    sampled = sample_rows(mask.tokens[0], mask.block[0], rows, seed)
    mass = block_mass(q, k, sampled, mask.block[1], scale)
    inside = (mass * mask.keep.to(mass.device)).sum(-1)
    starts = torch.arange(mask.shape[0], device=mass.device) * mask.block[0]
    lengths = (mask.tokens[0] - starts).clamp(max=mask.block[0]).to(mass.dtype)
    heads = (inside @ (lengths / mask.tokens[0])).clamp(0, 1).tolist()
    return Coverage(tuple(heads), sum(heads) / len(heads), min(heads))
