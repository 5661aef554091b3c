"""Block masks: which blocks of keys each block of queries attends to, head by head, and how they are found.

A mask is found from the true softmax of a few query rows against all keys (LoSA, arXiv 2608.12032; Chorus II, arXiv
2606.25040), never from pooled queries and keys, since pooling and softmax do not commute.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

KEPT = 0.95  # attention mass that a mask keeps (Chorus II's default)
FLOOR = 0.05  # least share of key blocks per query block: peaked heads break without one (Chorus II, SCOPE)
ROW_SHARE = 1 / 16  # of the query rows are looked at
GROUP = 8  # layers over which every pair of blocks is visited once (Chorus II)
SCRATCH = 2**26  # bytes of attention probabilities held at a time while looking
LARGEST, SMALLEST = (128, 64), (32, 16)  # query and key blocks
_HEADER = struct.Struct("<8sIIIII")  # magic, heads, query tokens, key tokens, query block, key block
_MAGIC = b"CARNBM\x00\x01"  # the last byte is the version


def default_blocks(tokens: int) -> tuple[int, int]:
    """Query and key block for a self-attention of `tokens`: 128 x 64, halved until there are 16 blocks of queries."""
    queries, keys = LARGEST
    while tokens < 16 * queries and (queries, keys) != SMALLEST:
        queries, keys = queries // 2, keys // 2
    return queries, keys


@dataclass(eq=False)
class BlockMask:
    """keep (heads, query blocks, key blocks), bool; `block` and `tokens` are (queries, keys) in tokens.

    The last block of either axis may be shorter. Every query block keeps a key block; ValueError otherwise. `keep` must
    not be changed in place: `plans` holds what a kernel made of it.
    """

    keep: torch.Tensor
    block: tuple[int, int]
    tokens: tuple[int, int]
    plans: dict[tuple, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.block, self.tokens = tuple(map(int, self.block)), tuple(map(int, self.tokens))
        _check_sizes(self.block, self.tokens)
        if self.keep.dtype != torch.bool or self.keep.ndim != 3:
            raise ValueError(f"keep must be bool (heads, query blocks, key blocks), not {_told(self.keep)}")
        if not self.heads or tuple(self.keep.shape[1:]) != self.shape:
            raise ValueError(f"{_told(self.keep)} does not fit {self.shape} blocks of {self.tokens} tokens")
        if not bool(self.keep.any(-1).all()):
            raise ValueError("a query block keeps no key block, so its attention is undefined")

    @classmethod
    def full(cls, heads: int, tokens: tuple[int, int], block: tuple[int, int] | None = None) -> BlockMask:
        """The mask that keeps everything."""
        block = block or default_blocks(tokens[0])
        _check_sizes(block, tokens)
        return cls(torch.ones(heads, *_counts(tokens, block), dtype=torch.bool), block, tokens)

    @property
    def heads(self) -> int:
        return self.keep.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of query blocks and key blocks."""
        return _counts(self.tokens, self.block)

    @property
    def density(self) -> float:
        """Share of blocks kept, in (0, 1]."""
        return self.keep.float().mean().item()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        return (self.block, self.tokens) == (other.block, other.tokens) and torch.equal(
            self.keep.cpu(), other.keep.cpu()
        )

    __hash__ = None

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask on a device."""
        return BlockMask(self.keep.to(device), self.block, self.tokens)

    def with_keep(self, keep: torch.Tensor) -> BlockMask:
        """Another choice of blocks, same sizes."""
        return BlockMask(keep, self.block, self.tokens)

    def elements(self) -> torch.Tensor:
        """The mask query by key, bool (heads, query tokens, key tokens): what it means, and far too large to use."""
        rows = self.keep.repeat_interleave(self.block[0], 1)[:, : self.tokens[0]]
        return rows.repeat_interleave(self.block[1], 2)[:, :, : self.tokens[1]]

    def packed(self) -> torch.Tensor:
        """All of the mask as one uint8 vector on the CPU: a header of 28 bytes, then one bit a block, lowest first."""
        bits = self.keep.cpu().flatten()
        bits = F.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
        body = (bits << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
        header = _HEADER.pack(_MAGIC, self.heads, *self.tokens, *self.block)
        return torch.cat([torch.frombuffer(bytearray(header), dtype=torch.uint8), body])

    @classmethod
    def unpack(cls, data: torch.Tensor) -> BlockMask:
        """The mask that `packed` wrote; ValueError for anything else."""
        if data.dtype != torch.uint8 or data.ndim != 1 or data.numel() < _HEADER.size:
            raise ValueError(f"a packed mask is a uint8 vector with a header, not {_told(data)}")
        data = data.cpu()
        magic, heads, *sizes = _HEADER.unpack(bytes(data[: _HEADER.size].tolist()))
        if magic != _MAGIC:
            raise ValueError("not a packed block mask, or one of another version")
        tokens, block = tuple(sizes[:2]), tuple(sizes[2:])
        _check_sizes(block, tokens)
        shape = (heads, *_counts(tokens, block))
        count, body = shape[0] * shape[1] * shape[2], data[_HEADER.size :]
        if body.numel() != -(-count // 8):
            raise ValueError(f"a mask of {shape} blocks takes {-(-count // 8)} bytes, found {body.numel()}")
        bits = (body[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        bits = bits.flatten().bool()
        if bool(bits[count:].any()):
            raise ValueError("bits are set behind the end of the packed mask; it was damaged")
        return cls(bits[:count].view(shape).clone(), block, tokens)


def _told(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _counts(tokens: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return -(-tokens[0] // block[0]), -(-tokens[1] // block[1])


def _check_sizes(block: tuple[int, int], tokens: tuple[int, int]) -> None:
    for name, sizes in (("block sizes", block), ("token counts", tokens)):
        if len(sizes) != 2 or any(size < 1 for size in sizes):
            raise ValueError(f"{name} must be two positive numbers (queries, keys), not {tuple(sizes)}")


def sample_rows(tokens: int, block: int, share: float = ROW_SHARE, seed: int = 0) -> list[torch.Tensor]:
    """Query rows to look at, one sorted vector of indices per query block.

    A block of n tokens gives floor(share n) rows, at least one. Each is drawn from its own equal stretch of the block:
    a fixed stride would meet the same column of every frame wherever it divides the frame's width.
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share of rows must lie in (0, 1], not {share}")
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for start in range(0, tokens, block):
        length = min(block, tokens - start)
        count = max(1, int(share * length))
        edges = torch.arange(count + 1) * length // count
        places = edges[:-1] + (torch.rand(count, generator=draw) * edges.diff()).long()
        rows.append(start + places.minimum(edges[1:] - 1))  # a product may round up to the next stretch
    return rows


def block_mass(q: torch.Tensor, k: torch.Tensor, rows: Sequence[torch.Tensor], key_block: int, scale: float | None):
    """True softmax mass of every key block, averaged over each query block's sampled rows.

    q (heads, query tokens, d), k (heads, key tokens, d) -> float32 (heads, query blocks, key blocks), rows sum to 1.
    At most SCRATCH bytes of probabilities exist at a time.
    """
    heads, tokens, size = k.shape
    scale = size**-0.5 if scale is None else scale
    index, owner = torch.cat(list(rows)).to(q.device), _owners(rows, q.device)
    pad, step = -tokens % key_block, max(1, SCRATCH // (4 * tokens))
    mass = torch.zeros(heads, len(rows), -(-tokens // key_block), device=q.device)
    for head in range(heads):
        keys = k[head].float().t()
        for part, owners in zip(index.split(step), owner.split(step), strict=True):
            weights = (q[head, part].float() * scale @ keys).softmax(-1)
            weights = F.pad(weights, (0, pad)).view(len(part), -1, key_block).sum(-1)
            mass[head].index_add_(0, owners, weights)
    counts = torch.tensor([len(part) for part in rows], device=q.device, dtype=mass.dtype)
    return mass / counts[:, None]


def _owners(rows: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The query block of every sampled row."""
    return torch.cat([torch.full((len(part),), i) for i, part in enumerate(rows)]).to(device)


def check_pair(q: torch.Tensor, k: torch.Tensor) -> None:
    """Raises ValueError unless q is (heads, query tokens, d) and k (heads, key tokens, d)."""
    if q.ndim != 3 or k.ndim != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(f"need q and k (heads, tokens, d) of equal heads and d, not {_told(q)} and {_told(k)}")
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"there is nothing to attend in {_told(q)} and {_told(k)}")


@torch.no_grad()
def find_mask(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    kept: float = KEPT,
    floor: float = FLOOR,
    block: tuple[int, int] | None = None,
    text: Sequence[tuple[int, int]] = (),
    rows: float = ROW_SHARE,
    seed: int = 0,
    scale: float | None = None,
) -> BlockMask:
    """The mask of one attention, from sampled query rows.

    q (heads, query tokens, d) and k (heads, key tokens, d) are what the softmax sees: after norm and rotary embedding,
    of one clip and one guidance branch. For every head and query block the smallest set of key blocks is kept whose
    mean mass over the sampled rows reaches `kept` in (0, 1], but at least the share `floor` in [0, 1] of them. Key
    blocks that touch a range [start, stop) in `text` are always kept, and their mass counts. ValueError for bad inputs.
    """
    check_pair(q, k)
    for name, value, low in (("kept", kept, 0 < kept), ("floor", floor, 0 <= floor)):
        if not (low and value <= 1):
            raise ValueError(f"{name} is a share of at most 1, not {value}")
    block = block or default_blocks(q.shape[1])
    tokens = (q.shape[1], k.shape[1])
    _check_sizes(block, tokens)
    mass = block_mass(q, k, sample_rows(tokens[0], block[0], rows, seed), block[1], scale)
    if not bool(torch.isfinite(mass).all()):
        raise ValueError("q or k hold non-finite values; the run collapsed and no mask can be read from it")
    return BlockMask(_smallest(mass, kept, floor, _text_blocks(text, tokens[1], block[1]).to(q.device)), block, tokens)


def top_mask(mass: torch.Tensor, density: float, block: tuple[int, int], tokens: tuple[int, int]) -> BlockMask:
    """The mask that keeps, for every head and query block, the share `density` in (0, 1] of key blocks of most mass.

    `mass` as from `block_mass`. For comparisons at equal density; a run uses `find_mask`.
    """
    if not 0 < density <= 1:
        raise ValueError(f"the density is a share of at most 1, not {density}")
    count = max(1, round(density * mass.shape[-1]))
    chosen = mass.topk(count, dim=-1).indices
    return BlockMask(torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, chosen, True), block, tokens)


def _text_blocks(text: Sequence[tuple[int, int]], tokens: int, block: int) -> torch.Tensor:
    chosen = torch.zeros(-(-tokens // block), dtype=torch.bool)
    for start, stop in text:
        if not 0 <= start < stop <= tokens:
            raise ValueError(f"the text range {start}:{stop} does not lie within {tokens} keys")
        chosen[start // block : -(-stop // block)] = True
    return chosen


def _smallest(mass: torch.Tensor, kept: float, floor: float, always: torch.Tensor) -> torch.Tensor:
    """The smallest set of key blocks that reaches `kept`, beside `always`; mass (heads, query blocks, key blocks)."""
    if kept >= 1:
        return torch.ones_like(mass, dtype=torch.bool)
    total = mass.shape[-1]
    order = (mass + 2.0 * always).argsort(dim=-1, descending=True, stable=True)  # 2 exceeds every mass
    reached = mass.gather(-1, order).cumsum(-1)
    needed = (reached < kept).sum(-1, keepdim=True) + 1
    needed = needed.clamp(min=max(1, int(always.sum()), round(floor * total)), max=total)
    chosen = torch.arange(total, device=mass.device) < needed
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, order, chosen)


def revisit(masks: Sequence[BlockMask], group: int = GROUP) -> list[BlockMask]:
    """Masks of consecutive layers, such that every pair of blocks is attended to at least once in each group.

    The last layer of a group gets the pairs that none of its layers visited (Chorus II, block-pair visit refresh). The
    layers are split into groups of `group` as evenly as can be, so that no short last group becomes dense.
    """
    if group < 1:
        raise ValueError(f"a group has at least one layer, not {group}")
    masks = list(masks)
    if not masks:
        return []
    first = masks[0]
    if any((m.block, m.tokens, m.heads) != (first.block, first.tokens, first.heads) for m in masks):
        raise ValueError("layers of different heads, tokens or block sizes cannot stand in for each other")
    count = max(1, round(len(masks) / group))
    for number in range(count):
        start, stop = len(masks) * number // count, len(masks) * (number + 1) // count
        visited = torch.stack([mask.keep for mask in masks[start:stop]]).any(0)
        masks[stop - 1] = masks[stop - 1].with_keep(masks[stop - 1].keep | ~visited)
    return masks
