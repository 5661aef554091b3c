"""Attention as a real run has it: queries, keys and values of the embedded model at the end of its probe."""

from __future__ import annotations

import random

import torch

from ..attention.blocks import BlockMask, find_mask
from ..mini import codec, world
from ..mini import model as mini
from ..schedule import probe_steps
from .connectivity import look
from .speed import latent_of

STEPS = 50
LAYER = 2  # one from the middle; the first stays dense in a run
HALVINGS = 12


def tensors(tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v, each (1, heads, at least so many tokens, d), float32: one layer of the guided branch of one clip."""
    step, prompt = probe_steps(STEPS) - 1, world.caption(world.random_scene(random.Random(seed), "fit"))
    size = latent_of(tokens)[1] * codec.BLOCK
    seen = look(mini.load(), prompt, seed, size, STEPS, [step], keep=True)
    return tuple(x[None] for x in seen.qkv[step][0, LAYER])


def mask_of(q: torch.Tensor, k: torch.Tensor, block: tuple[int, int], density: float) -> BlockMask:
    """The mask that a run would find for q, k (1, heads, tokens, d), at the kept mass that gives about this density."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        kept = (low + high) / 2
        mask = find_mask(q[0], k[0], kept=kept, floor=0, block=block)
        low, high = (kept, high) if mask.density < density else (low, kept)
    return mask
