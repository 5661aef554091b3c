"""Which words of two prompts differ, told in the text encoder's own space.

No tokenizer, no language model, no word classes: rows of the conditioning are matched by cosine, one to one wherever
they stand; so any language and any kind of word works. A trained encoder moves every row a little when one word
changes; a row counts as changed when its match is farther away than half of what usually lies between two different
rows of one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

SHARE = 0.5  # of the usual distance between different rows


@dataclass(frozen=True)
class Alignment:
    """Row indices that have no counterpart, and the largest distance of two matched rows (0 to 2)."""

    target: tuple[int, ...]
    donor: tuple[int, ...]
    distance: float

    @property
    def same(self) -> bool:
        return not self.target and not self.donor


def _usual_distance(rows: torch.Tensor) -> float:
    """Median over rows of the cosine distance to all other rows of the same prompt; 1 for a single row."""
    if len(rows) < 2:
        return 1.0
    distance = 1 - rows @ rows.T
    others = ~torch.eye(len(rows), dtype=torch.bool)
    return distance[others].median().clamp_min(1e-6).item()


def _one_to_one(distance: torch.Tensor) -> list[tuple[int, int]]:
    """Pairs of rows, nearest first, each row once: a new word cannot hide behind a neighbour that has its own match."""
    free, pairs = distance.clone(), []
    for _ in range(min(distance.shape)):
        i, j = divmod(int(free.argmin()), distance.shape[1])
        pairs.append((i, j))
        free[i, :], free[:, j] = torch.inf, torch.inf
    return pairs


def align(target: torch.Tensor, donor: torch.Tensor, share: float = SHARE) -> Alignment:
    """Compare two conditionings (L, C) and (M, C), without padding rows.

    ValueError when they do not come from one encoder (other width) or hold no row.
    """
    if target.ndim != 2 or donor.ndim != 2 or target.shape[1] != donor.shape[1] or not len(target) or not len(donor):
        raise ValueError(f"cannot align conditionings of shapes {tuple(target.shape)} and {tuple(donor.shape)}")
    a, b = F.normalize(target.float(), dim=-1), F.normalize(donor.float(), dim=-1)
    distance = 1 - a @ b.T
    bound = share * min(_usual_distance(a), _usual_distance(b))
    pairs = _one_to_one(distance)
    kept = [(i, j) for i, j in pairs if distance[i, j] <= bound]
    return Alignment(
        tuple(sorted(set(range(len(a))) - {i for i, _ in kept})),
        tuple(sorted(set(range(len(b))) - {j for _, j in kept})),
        max([0.0, *(distance[i, j].item() for i, j in pairs)]),
    )
