"""The Early Signature: what the probe knows of a request, small enough to keep with every donor (paper, 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .taps import Taps

REQUIRED = ("conditioning", "x0")


@dataclass(frozen=True)
class EarlySignature:
    """`cross` and `guidance` are None where the host offered no such tap."""

    conditioning: torch.Tensor  # (L, C) rows of the positive prompt, unpadded
    x0: torch.Tensor  # guided prediction at the end of the probe, (B, C, T, H, W)
    cross: torch.Tensor | None = None  # text attention of the middle layer, (L, t, h, w)
    guidance: torch.Tensor | None = None  # difference of the guidance branches, (t, h, w)

    @classmethod
    def of_probe(cls, conditioning: torch.Tensor, x0: torch.Tensor, taps: Taps | None) -> EarlySignature:
        return cls(conditioning, x0, taps.cross if taps else None, taps.guidance if taps else None)

    def tensors(self) -> dict[str, torch.Tensor]:
        """As an entry stores it: 16 bits, by name."""
        parts = {name: getattr(self, name) for name in (*REQUIRED, "cross", "guidance")}
        return {name: part.detach().to("cpu", torch.float16) for name, part in parts.items() if part is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> EarlySignature:
        """ValueError when a required part is missing."""
        missing = [name for name in REQUIRED if name not in tensors]
        if missing:
            raise ValueError(f"the stored signature lacks {', '.join(missing)}")
        return cls(*(tensors[name].float() if name in tensors else None for name in (*REQUIRED, "cross", "guidance")))
