"""A window of middle layers in which only chosen tokens are computed (paper, section 3.3; its table 5 for the layers).

All tokens pass the layers before and behind the window. The chosen ones are computed in it as a clip of their own, with
their own positions; the others take over what the window did to them at the last full step, so that the layers behind
find every token where they expect it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

BEFORE, BEHIND = 0.2, 0.17  # shares of the layers outside the window: 6 and 5 of 30
BYTES = 2**28  # that a run keeps on the model's device for each forward of a step; what is larger waits on the CPU


class TokenWindow:
    """State of one sampling run; a host calls `begin` before each step and sends every block through `block`.

    `layers`: how many blocks the transformer has. The window costs memory: one hidden state (tokens x width, in the
    model's dtype) for each guidance branch, on the model's device up to `BYTES`.
    """

    def __init__(self, layers: int):
        self.layers = layers
        self.first = max(1, round(BEFORE * layers))
        self.last = layers - 1 - max(1, round(BEHIND * layers))
        # What the window added to every token, by guidance branches or, where a host does not tell them, by the
        # forward's place in its step.
        self._changes: dict[Hashable, torch.Tensor] = {}
        self._index: torch.Tensor | None = None
        self._entry: torch.Tensor | None = None
        self._forward: Hashable = None
        self._count = 0
        self._partial = False

    @property
    def depth(self) -> int:
        """Layers in the window; 0 for a transformer too short to have one."""
        return max(0, self.last - self.first + 1)

    def share_of_layers(self) -> float:
        return self.depth / self.layers

    def begin(self, index: torch.Tensor | None) -> None:
        """Before the forwards of one step: compute only the tokens in `index`, or all and remember (None)."""
        self._index, self._count, self._entry = index, 0, None

    def release(self) -> None:
        """Give the memory back."""
        self._changes.clear()
        self._entry = self._index = None

    def block(
        self,
        layer: int,
        hidden: torch.Tensor,
        run: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
        branches: Hashable = None,
    ) -> torch.Tensor:
        """One block on hidden states (b, tokens, d). `run(hidden, index)` is the block itself on these tokens.

        `branches`: which guidance branches the forward computes, where the host knows.
        """
        if not self.first <= layer <= self.last:
            return run(hidden, None)
        if layer == self.first:
            self._enter(hidden, branches)
        if not self._partial:
            out = run(hidden, None)
            if layer == self.last and self._index is None:
                change = out - self._entry
                large = change.numel() * change.element_size() > BYTES
                self._changes[self._forward] = change.cpu() if large else change
            return out
        index = self._index.to(hidden.device)
        out = run(hidden[:, index] if layer == self.first else hidden, index)
        return out if layer < self.last else self._scattered(out, index)

    def _enter(self, hidden: torch.Tensor, branches: Hashable) -> None:
        self._forward = self._count if branches is None else branches
        self._count += 1
        self._entry = hidden.clone()  # blocks of some hosts add to their input in place
        known = self._changes.get(self._forward)
        self._partial = self._index is not None and known is not None and known.shape == hidden.shape

    def _scattered(self, out: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        full = self._entry + self._changes[self._forward].to(out.device)
        full[:, index] = out
        return full

    @property
    def was_partial(self) -> bool:
        """Whether the last forward computed only the chosen tokens."""
        return self._partial
