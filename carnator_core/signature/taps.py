"""What the probe reads from the model while it works: attention of one middle layer, and the two guidance branches.

A tap only reads. Hosts hand it queries and keys as they stand right before attention (after norm and rotary position);
where a host does not offer them, a signature simply has fewer parts.
"""

from __future__ import annotations

import torch

from ..grid import TokenGrid

SCRATCH = 2**26  # bytes of attention that are held at a time
MOST_HEADS = 8  # whose queries and keys are copied; Wan 14B's forty would take 1.5 GB at 720p


def middle_layer(layers: int) -> int:
    """The layer whose attention is read: the middle one, where the paper too takes a fixed intermediate layer."""
    return layers // 2


def text_attention(q: torch.Tensor, k: torch.Tensor, rows: int) -> torch.Tensor:
    """Cross-attention of every visual token to the first `rows` text rows, averaged over heads: (rows, tokens).

    q (heads, tokens, d), k (heads, text rows, d); the softmax runs over all text rows, as the model's own does.
    """
    keys, parts = k.float().mT * q.shape[-1] ** -0.5, []
    for piece in q.split(pieces(k.shape[0] * k.shape[1]), dim=1):
        weights = torch.softmax(piece.float() @ keys, dim=-1)
        parts.append(weights[..., :rows].mean(0))
    return torch.cat(parts).mT


def pieces(columns: int) -> int:
    """How many rows of so many float32 columns stay within `SCRATCH`; at least one."""
    return max(1, SCRATCH // (4 * columns))


class Taps:
    """Collects one probe step's states of the conditional branch; the latest call wins."""

    def __init__(self, grid: TokenGrid, rows: int):
        self.grid, self.rows = grid, rows
        self.cross: torch.Tensor | None = None  # (rows, t, h, w)
        self.self_qk: tuple[torch.Tensor, torch.Tensor] | None = None  # each (heads, tokens, d)
        self.guidance: torch.Tensor | None = None  # (t, h, w)

    def read_cross(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """q (heads, tokens, d), k (heads, text rows, d). Anything of another token count is not this grid's."""
        if q.shape[1] == self.grid.tokens and k.shape[1] >= self.rows:
            maps = text_attention(q, k, self.rows)
            self.cross = maps.reshape(self.rows, self.grid.t, self.grid.h, self.grid.w)

    def read_self(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """q, k (heads, tokens, d); copied, as hosts reuse their buffers, from at most `MOST_HEADS` heads."""
        if q.shape[1] == k.shape[1] == self.grid.tokens:
            heads = slice(None, None, -(-q.shape[0] // MOST_HEADS))
            self.self_qk = (q[heads].detach().clone(), k[heads].detach().clone())

    def read_branches(self, cond: torch.Tensor, uncond: torch.Tensor) -> None:
        """Where the prompt acts: root mean square difference of the two branches, both (1, C, T, H, W)."""
        difference = (cond.float() - uncond.float()).pow(2).mean(1, keepdim=True)
        self.guidance = self.grid.to_tokens(difference)[0, 0].sqrt()

    def release(self) -> None:
        """Let go of what only the target's own evidence needs."""
        self.self_qk = None
