"""One short vector for a prompt, from its conditioning rows: what recall compares."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import torch

DIMENSIONS = 384  # at most; wider conditioning is projected (an error of a tenth of the distance between two texts)
_SEED = "carnator text projection 1"


@lru_cache(maxsize=4)
def _projection(width: int) -> torch.Tensor:
    """Fixed signs (width, DIMENSIONS): the same on every machine, so vectors of two machines compare.

    In torch, as numpy's own threads spin for some 80 ms after a product, and the model's threads then wait for them.
    """
    count = width * DIMENSIONS
    data = hashlib.shake_256(f"{_SEED}:{width}".encode()).digest(-(-count // 8))
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8))[:count]
    return torch.from_numpy((bits.reshape(width, DIMENSIONS).astype(np.float32) * 2 - 1) / np.float32(width**0.5))


def text_vector(conditioning: torch.Tensor) -> np.ndarray:
    """Mean of the rows (L, C), projected to at most 384 dimensions, of unit length; float16.

    Zero when the rows cancel or are all zero. Raises ValueError for another shape or non-finite rows.
    """
    if conditioning.ndim != 2 or 0 in conditioning.shape:
        raise ValueError(f"conditioning must be rows (L, C), not {tuple(conditioning.shape)}; strip batch and padding")
    mean = conditioning.detach().float().mean(0).cpu()
    if not mean.isfinite().all():
        raise ValueError("the conditioning holds non-finite values; check the text encoder's precision")
    vector = (mean @ _projection(len(mean)) if len(mean) > DIMENSIONS else mean).numpy()
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / length if length > 0 else vector).astype(np.float16)
