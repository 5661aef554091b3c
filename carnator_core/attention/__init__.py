"""The Sparse Attention Patch's core: block masks, how much attention they cover, and the kernels that run them."""

from .blocks import BlockMask, default_blocks, find_mask, revisit
from .choice import Choice, Chooser
from .coverage import Coverage, coverage
from .kernels import sparse_attention

__all__ = [
    "BlockMask",
    "Choice",
    "Chooser",
    "Coverage",
    "coverage",
    "default_blocks",
    "find_mask",
    "revisit",
    "sparse_attention",
]
