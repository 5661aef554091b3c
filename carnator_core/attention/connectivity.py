"""One run's connectivity: masks of every layer and guidance branch, read at one dense step and used at later ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .blocks import FLOOR, KEPT, BlockMask, find_mask, revisit
from .choice import Choice, Chooser, Dense
from .kernels import PORTABLE, sparse_attention

FIRST_DENSE = 1  # layers whose attention stays whole
KERNELS = ("auto", "portable")


class Connectivity:
    """Self-attention of one run: `record` at one step, `close`, then `attend` at the steps that may be sparse.

    `kept`: mass that a query block's key blocks must reach, in (0, 1]. `kernel`: "auto" takes the sparse kernel only
    where it measures faster than the host's own attention; "portable" always takes it.
    """

    def __init__(self, kept: float = KEPT, kernel: str = "auto", floor: float = FLOOR):
        if kernel not in KERNELS:
            raise ValueError(f"kernel {kernel!r} is unknown; use one of {', '.join(KERNELS)}")
        self.kept, self.kernel, self.floor = kept, kernel, floor
        self.masks: dict[tuple[int, int], BlockMask] = {}
        self.applied = 0  # attentions that were computed sparsely
        self.reason = "no mask was recorded"
        self._chooser = Chooser()

    def record(
        self, layer: int, branch: int, q: torch.Tensor, k: torch.Tensor, text: tuple[int, int] | None = None
    ) -> None:
        """Find the mask of one layer and guidance branch (0 conditional, 1 unconditional); q, k (heads, tokens, d).

        `text`: which keys are text, in a joint sequence.
        """
        if layer >= FIRST_DENSE:
            ranges = (text,) if text else ()
            self.masks[branch, layer] = find_mask(q, k, kept=self.kept, floor=self.floor, text=ranges)

    def close(self) -> None:
        """After the recorded step: let every pair of blocks be visited by some layer."""
        self.reason = "masks were found and no step used them"
        for branch in {branch for branch, _ in self.masks}:
            layers = sorted(layer for b, layer in self.masks if b == branch)
            for layer, mask in zip(layers, revisit([self.masks[branch, i] for i in layers]), strict=True):
                self.masks[branch, layer] = mask

    @property
    def density(self) -> float | None:
        """Mean share of kept blocks; None before anything is recorded."""
        return sum(m.density for m in self.masks.values()) / len(self.masks) if self.masks else None

    def attend(
        self, layer: int, branches: Sequence[int], dense: Dense, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """The attention of one layer; `branches` names the guidance branch of every batch row.

        The host's own `dense(q, k, v)`, untouched, where no mask is known, masks do not fit, or sparse does not win.
        Layouts as in `sparse_attention`.
        """
        masks = [self.masks.get((branch, layer)) for branch in branches]
        tokens = (q.shape[-2], k.shape[-2])
        if len(masks) != len(q) or any(m is None or m.tokens != tokens for m in masks):
            return dense(q, k, v)
        choice = self._choose(dense, q, k, v, max(masks, key=lambda mask: mask.density))
        self.reason = choice.reason
        if choice.backend is None:
            return dense(q, k, v)
        self.applied += 1
        return sparse_attention(q, k, v, masks, backend=choice.backend)

    def stand_in(self, branches: Sequence[int], recording: bool) -> Callable[..., torch.Tensor]:
        """What a backbone's `attending` takes: records masks and lets the model's own answer, or attends with them."""

        def attend(layer: int, dense: Dense, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, text=None):
            if not recording:
                return self.attend(layer, branches, dense, q, k, v)
            for row, branch in enumerate(branches):
                self.record(layer, branch, q[row], k[row], text)
            return dense(q, k, v)

        return attend

    def told(self, becomes_donor: bool) -> str:
        """What became of it, for a report."""
        if becomes_donor and not self.applied:
            return "sparse attention waits for a hit: this run was computed in full, so that later ones can borrow"
        line = f"sparse attention: {self.reason}"
        return line if self.applied else f"{line}; all attention was dense"

    def _choose(self, dense: Dense, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> Choice:
        if self.kernel == PORTABLE:
            return Choice(PORTABLE, 1.0, "the portable kernel was asked for")
        return self._chooser.choose(dense, q, k, v, mask)
