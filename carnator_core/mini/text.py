"""The embedded text encoder: tiny, deterministic, without weights, of the shape that Wan's T5 gives (B, L, 4096).

Every word piece is a vector of signs taken from a hash; one fixed attention layer with relative positions then mixes
the rows, so that one changed word moves every row of the prompt a little, as in a trained encoder. Rows behind the
end token are zero, as Wan pads its T5.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

import torch

WIDTH = 4096
LENGTH = 32
END = "</s>"
MIX = 0.45  # weight of the context in every row
_HEAD = 64


@lru_cache(maxsize=4096)
def _signs(name: str, count: int) -> torch.Tensor:
    """`count` signs (+1, -1) that depend on `name` alone."""
    data = torch.frombuffer(bytearray(hashlib.shake_256(name.encode()).digest(count // 8)), dtype=torch.uint8)
    bits = (data[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten().float() * 2 - 1


def pieces(prompt: str) -> list[str]:
    """Words and punctuation, lower-cased; a plural splits into its stem and "s"."""
    out: list[str] = []
    for word in re.findall(r"\w+|[^\w\s]", prompt.lower()):
        stem = word[:-2] if word == "crosses" else word[:-1]
        plural = len(word) > 4 and word.endswith("s") and not word.endswith("ss")
        out.extend((stem, "s") if plural else (word,))
    return out


def encode_one(prompt: str) -> torch.Tensor:
    """Rows of one prompt, end token included, unpadded: (n, 4096), each of unit mean square."""
    words = [*pieces(prompt)[: LENGTH - 1], END]
    rows = torch.stack([_signs("word:" + w, WIDTH) for w in words])
    query = rows @ _signs("query", WIDTH * _HEAD).view(WIDTH, _HEAD) / WIDTH**0.5
    key = rows @ _signs("key", WIDTH * _HEAD).view(WIDTH, _HEAD) / WIDTH**0.5
    place = torch.arange(len(words))
    near = -0.15 * (place[:, None] - place[None]).abs().float()
    weights = torch.softmax(query @ key.T / _HEAD**0.5 + near, dim=-1)
    mixed = rows + MIX * len(words) ** 0.5 * (weights @ rows)
    return mixed / mixed.pow(2).mean(-1, keepdim=True).sqrt()


def encode(prompts: list[str]) -> torch.Tensor:
    """Embeddings (B, 32, 4096) in float32; an empty prompt is the end token alone."""
    out = torch.zeros(len(prompts), LENGTH, WIDTH)
    for i, prompt in enumerate(prompts):
        rows = encode_one(prompt)
        out[i, : len(rows)] = rows
    return out
