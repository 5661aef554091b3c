"""What tokens that are not computed contribute to attention: their keys and values, remembered from a full step."""

from __future__ import annotations

from collections.abc import Hashable

import torch

Range = tuple[int, int]

BUDGET = 6 * 2**30  # bytes on the model's device
SPARE = 2 * 2**30  # bytes of a GPU that are left to the model


class Context:
    """Keys and values of the video's tokens in a run of `depth` layers, for each forward of a step.

    What would need more than `budget` bytes, or more than a GPU has left, is not kept, nor what a host cannot hand
    over: `refused` then says why.
    """

    def __init__(self, depth: int, budget: int | None = None):
        self.depth, self.budget = depth, BUDGET if budget is None else budget
        self.refused = ""
        self._kept: dict[Hashable, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}

    def knows(self, forward: Hashable) -> bool:
        """Whether every layer of this forward is remembered."""
        return len(self._kept.get(forward, ())) == self.depth > 0

    def remembered(self, forward: Hashable, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (..., s, d) of one layer, themselves and no copies. KeyError where none are kept."""
        return self._kept[forward][layer]

    def missing(self) -> str:
        """Why no forward is remembered after a full step; empty where one is."""
        seen = any(self.knows(forward) for forward in self._kept)
        return self.refused or ("" if seen else "the model's attention was not seen")

    def refuse(self, reason: str) -> None:
        """Keep nothing from now on."""
        self.refused = reason
        self.release()

    def forget(self, forward: Hashable) -> None:
        self._kept.pop(forward, None)

    def release(self) -> None:
        self._kept.clear()

    def keep(self, forward: Hashable, layer: int, k: torch.Tensor, v: torch.Tensor, text: Range | None) -> None:
        """Remember one layer of a full forward; k and v (..., s, d)."""
        if self.refused:
            return
        layers = self._kept.setdefault(forward, {})
        reason = "" if layers else self._too_large(k, v)
        if reason:
            self.refuse(reason)
            return
        try:
            layers[layer] = _own(_video(k, text)), _own(_video(v, text))
        except torch.OutOfMemoryError:
            self.refuse("the device has no memory left for keys and values")

    def around(
        self, forward: Hashable, layer: int, index: torch.Tensor, k: torch.Tensor, v: torch.Tensor, text: Range | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens, given those of the tokens in `index`, which are remembered from now on, and of
        the text."""
        kept = self.remembered(forward, layer)
        for known, new in zip(kept, (k, v), strict=True):
            known.index_copy_(-2, index, _video(new, text).to(known.dtype))
        if text is None:
            return kept
        start, stop = text
        joint = []
        for known, new in zip(kept, (k, v), strict=True):
            words = new[..., start:stop, :]
            joint.append(torch.cat((words, known) if start == 0 else (known, words), dim=-2))
        return joint[0], joint[1]

    def _too_large(self, k: torch.Tensor, v: torch.Tensor) -> str:
        """Why another forward like this one may not be kept; empty where it may."""
        needed = self.depth * (k.nbytes + v.nbytes)
        total = needed * max(1, len(self._kept))
        if total > self.budget:
            return f"keys and values would take {_gb(total)}, more than {_gb(self.budget)}"
        if k.is_cuda and needed + SPARE > _left(k.device):
            return f"the device has too little memory left to keep {_gb(needed)} of keys and values"
        return ""


def _video(x: torch.Tensor, text: Range | None) -> torch.Tensor:
    """Without the text, which lies at one end of a joint sequence."""
    if text is None:
        return x
    start, stop = text
    return x[..., stop:, :] if start == 0 else x[..., :start, :]


def _own(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself where it is all of its memory, else a copy, which does not hold on to the rest."""
    alone = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x if alone else x.clone(memory_format=torch.contiguous_format)


def _left(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
