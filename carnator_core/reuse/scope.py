"""Scope: which tokens a region step computes, and how its prediction is blended with the answer (paper, section 3.3).

Active tokens are the evidence and a band around it, two tokens wide on the paper's grid of 22 rows. The paper's further
band, computed only so that the active ones have something to look at, has no part here: they see every token
(`reuse.context`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..grid import TokenGrid, dilate

ACTIVE = 2  # width of the band
LARGEST = 0.6  # share of active tokens above which a region step saves too little to be worth its seam


@dataclass(frozen=True)
class Scope:
    """Each field is (t, h, w): bool, and the weight W of the model's prediction in [0, 1]."""

    active: torch.Tensor
    weight: torch.Tensor

    @property
    def active_share(self) -> float:
        return self.active.float().mean().item()

    @property
    def index(self) -> torch.Tensor:
        """The active tokens, ascending, int64."""
        return self.active.flatten().nonzero().flatten()


def scope_of(region: torch.Tensor, grid: TokenGrid) -> Scope | None:
    """The scope around an evidence region (t, h, w); None when there is no region or it is too large to pay.

    W is 1 in the evidence and falls to 0 at the border of the active band as 1 - smoothstep of the distance.
    """
    if not bool(region.any()):
        return None
    width = grid.scaled(ACTIVE)
    weight, grown = region.float(), region
    for step in range(1, width + 1):
        wider = dilate(grown, 1)
        d = step / (width + 1)
        weight = torch.where(wider & ~grown, torch.tensor(1 - d * d * (3 - 2 * d)), weight)
        grown = wider
    scope = Scope(grown, weight)
    return scope if scope.active_share <= LARGEST else None
