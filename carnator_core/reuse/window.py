"""A window of layers in which only chosen tokens are computed (paper, section 3.3; its table 5 for the layers).

The first layers see all tokens. Behind them only the chosen ones are computed, with their own positions, and the others
take over what the window did to them at the last full step. Attention still sees every token: keys and values of those
that are not computed are remembered from that step. Without them the chosen tokens would be a clip of their own, and
their prediction would be no better than none (`bench context`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from ..attention.choice import Dense
from .context import Context, Range

BEFORE = 0.2  # share of the layers before the window: 6 of 30


class TokenWindow:
    """State of one sampling run; a host calls `begin` before each step and sends every block through `block` and every
    block's attention of the video's tokens through `attend`.

    `layers`: how many blocks the transformer has. The window costs memory on the model's device: for each forward of a
    step one hidden state (tokens x width), and the keys and values of `Context`, which has a budget.
    """

    def __init__(self, layers: int, context: Context | None = None):
        self.layers = layers
        self.first = max(1, round(BEFORE * layers))
        self.context = Context(self.depth) if context is None else context
        # What the window added to every token, by guidance branches or, where a host does not tell them, by the
        # forward's place in its step.
        self._changes: dict[Hashable, torch.Tensor] = {}
        self._index: torch.Tensor | None = None
        self._entry: torch.Tensor | None = None
        self._forward: Hashable = None
        self._layer: int | None = None  # whose attention is still to come
        self._count = 0
        self._partial = False

    @property
    def depth(self) -> int:
        """Layers in the window; 0 for a transformer too short to have one."""
        return max(0, self.layers - self.first)

    def share_of_layers(self) -> float:
        return self.depth / self.layers

    def begin(self, index: torch.Tensor | None) -> None:
        """Before the forwards of one step: compute only the tokens in `index`, or all and remember (None)."""
        self._index, self._count, self._entry = index, 0, None

    def release(self) -> None:
        """Give the memory back."""
        self._changes.clear()
        self.context.release()
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
        if layer < self.first:
            return run(hidden, None)
        if layer == self.first:
            self._enter(hidden, branches)
        self._layer = layer
        last = self.layers - 1
        if not self._partial:
            out = run(hidden, None)
            if layer == last:
                self._changes[self._forward] = out - self._entry
            return out
        index = self._index.to(hidden.device)
        out = run(hidden[:, index] if layer == self.first else hidden, index)
        return out if layer < last else self._scattered(out, index)

    def attend(
        self,
        dense: Dense,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        text: Range | None = None,
        known: bool = True,
    ) -> torch.Tensor:
        """An attention within `block`; the first one of each block is that of the video's tokens.

        `dense(q, k, v)`: the attention as the model would compute it. q, k, v (..., s, d), tokens last but one; `text`
        tells which keys of a joint sequence are text; not `known`: something about it (a mask) stands in the way.
        """
        layer, self._layer = self._layer, None
        if layer is None:
            return dense(q, k, v)
        if self._partial:
            return dense(q, *self.context.around(self._forward, layer, self._index.to(k.device), k, v, text))
        if known:
            self.context.keep(self._forward, layer, k, v, text)
        else:
            self.context.refuse("the model's attention has a mask")
        return dense(q, k, v)

    def _enter(self, hidden: torch.Tensor, branches: Hashable) -> None:
        self._forward = self._count if branches is None else branches
        opens, self._count = self._count == 0, self._count + 1
        self._entry = hidden.clone()  # blocks of some hosts add to their input in place
        known = self._changes.get(self._forward)
        matches = known is not None and known.shape == hidden.shape
        self._partial = self._index is not None and matches and self.context.knows(self._forward)
        if opens and not self._partial:  # a full step replaces all that is known, whatever its forwards are called
            self._changes.clear()
            self.context.release()
        elif not self._partial:
            self.context.forget(self._forward)

    def _scattered(self, out: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        full = self._entry + self._changes[self._forward]
        full[:, index] = out
        return full

    @property
    def was_partial(self) -> bool:
        """Whether the last forward computed only the chosen tokens."""
        return self._partial
