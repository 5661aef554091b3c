"""Attention inside a block mask: equal to dense attention under the same mask, faster where few blocks are kept.

The kept key blocks of a query block are gathered next to each other and attended to alone; query blocks with equally
many keys share one call, so nothing is padded or masked. Inference only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .blocks import BlockMask
from .flex import flex_attention, why_not

# `steps` and `fused` gather: one multiplies, takes the softmax and multiplies again, the other calls torch's
# scaled_dot_product_attention. In float32 on a CPU `steps` is faster with the cores to itself; `fused` enters fewer
# parallel regions, which counts where threads must wait for each other. `portable` is the first of these that can run.
STEPS, FUSED, FLEX, PORTABLE = "steps", "fused", "flex", "portable"
# Query-key pairs that one call should have, per thread: large enough to hide its overhead, small enough to stay in the
# second-level cache. A GPU wants far more.
PAIRS = {STEPS: 2**16, FUSED: 2**18}
PAIRS_GPU = 2**22
LARGEST_GROUP = 64


def backends(q: torch.Tensor) -> list[str]:
    """The back ends that can run on this dtype and device, the one to take unmeasured first."""
    return ([STEPS] if _takes_steps(q) else []) + [FUSED] + ([] if why_not(q.device) else [FLEX])


@dataclass(frozen=True)
class _Group:
    """Query blocks of one call: their numbers, their key blocks (g * count,), and how many keys each attends to. The
    key blocks of one with fewer keys than the others end in some that are not its own."""

    numbers: torch.Tensor
    keys: torch.Tensor
    lengths: list[int]
    run: tuple[int, int] | None  # the first block and the count, where one query block's keys lie side by side

    @property
    def length(self) -> int:
        return max(self.lengths)

    def of(self, blocks: torch.Tensor) -> torch.Tensor:
        """These query blocks (g, ...) of all; a view where one or two are asked for."""
        if len(self.numbers) <= 2:
            first, last = int(self.numbers[0]), int(self.numbers[-1])
            return blocks[first : last + 1 : max(1, last - first)]
        return blocks.index_select(0, self.numbers.to(blocks.device))


def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask | Sequence[BlockMask],
    *,
    scale: float | None = None,
    backend: str = PORTABLE,
) -> torch.Tensor:
    """softmax(scale q k^T) v over the kept blocks only.

    Inputs (b, heads, tokens, d) or (b, tokens, heads * d), with the heads of the mask; the answer has q's layout. q and
    k may differ in length. One mask serves all of the batch, a sequence gives one for each element. `scale` defaults to
    d ** -0.5; `backend` is one of `backends(q)`, or portable for the first of them. ValueError for inputs that do not
    fit and unknown back ends, RuntimeError for one that cannot run here.
    """
    masks = [mask] if isinstance(mask, BlockMask) else list(mask)
    if not masks:
        raise ValueError("no mask given")
    if q.ndim == 3:
        q, k, v = (_split(x, masks[0].heads) for x in (q, k, v))
        out = sparse_attention(q, k, v, masks, scale=scale, backend=backend)
        return out.transpose(1, 2).flatten(2)
    _check(q, k, v, masks)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    masks = masks * q.shape[0] if len(masks) == 1 else masks
    if backend not in (PORTABLE, STEPS, FUSED, FLEX):
        raise ValueError(f"no back end {backend!r}; there are {PORTABLE}, {STEPS}, {FUSED} and {FLEX}")
    if backend == FLEX:
        return flex_attention(q, k, v, masks, scale)
    if backend == STEPS and not _takes_steps(q):
        raise RuntimeError(f"the back end {STEPS!r} is for float32 on the CPU, not for {q.dtype} on {q.device.type}")
    if backend == PORTABLE:
        backend = STEPS if _takes_steps(q) else FUSED
    return _gathered(q, k, v, masks, scale, backend)


def _takes_steps(q: torch.Tensor) -> bool:
    """Whether intermediate steps may be held in q's own dtype without loss, and its device is known to gain by it."""
    return q.dtype == torch.float32 and q.device.type == "cpu"


def _split(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(b, tokens, heads * d) -> (b, heads, tokens, d)."""
    if x.ndim != 3 or x.shape[-1] % heads:
        raise ValueError(f"{tuple(x.shape)} is no (b, tokens, heads * d) with {heads} heads")
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Sequence[BlockMask]) -> None:
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if q.ndim != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3:] != k.shape[3:]:
        raise ValueError(
            f"q, k, v {shapes} are no (b, heads, tokens, d), nor (b, tokens, heads * d), that fit together"
        )
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device and q.is_floating_point()):
        raise ValueError(f"q, k, v must share one device and floating dtype, not {q.dtype}, {k.dtype}, {v.dtype}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("sparse attention has no gradient; call it under torch.no_grad()")
    if len(masks) not in (1, q.shape[0]):
        raise ValueError(f"{len(masks)} masks for a batch of {q.shape[0]}")
    wanted = (q.shape[1], (q.shape[2], k.shape[2]))
    for mask in masks:
        if (mask.heads, mask.tokens) != wanted or mask.block != masks[0].block:
            found = f"a mask of {mask.heads} heads, {mask.tokens} tokens, blocks {mask.block}"
            raise ValueError(f"{found} does not fit {wanted[0]} heads, {wanted[1]} tokens, blocks {masks[0].block}")


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """(b, heads, tokens, d) -> (b, heads * blocks, block * d), the last block of each head padded with zeros."""
    pad = -x.shape[2] % block
    x = F.pad(x, (0, 0, 0, pad)) if pad else x
    return x.reshape(x.shape[0], -1, block * x.shape[3])


def _plan(mask: BlockMask, pairs: int, least: int, padded: bool) -> list[_Group]:
    """The calls for one mask; kept with it, since a run meets its masks again at every step."""
    key = (pairs, least, padded)
    if key not in mask.plans:
        mask.plans[key] = list(_groups(mask, pairs, least, padded))
    return mask.plans[key]


def _groups(mask: BlockMask, pairs: int, least: int, padded: bool) -> Iterator[_Group]:
    """Calls that together cover all query blocks of all heads, of `pairs` query-key pairs but at least `least` query
    blocks each. Query blocks of a call have equally many keys or, where it may be `padded`, nearly so; then they are of
    one head, whose keys stay in the cache for as long as they are needed.
    """
    keep, block, tokens = mask.keep.cpu(), mask.block, mask.tokens[1]
    heads, queries, total = keep.shape
    lengths = keep.sum(-1) * block[1] - keep[..., -1].long() * (-tokens % block[1])  # the last block may be shorter
    # The kept blocks of each query block in order, then the others.
    order = keep.logical_not().to(torch.uint8).argsort(stable=True, dim=-1)
    order = (order + (torch.arange(heads) * total).view(-1, 1, 1)).view(-1, total).int()
    ranked = sorted(
        (number // queries if padded else 0, length, number) for number, length in enumerate(lengths.flatten().tolist())
    )
    while ranked:
        head, length, _ = ranked[0]
        chunk = [row for row in ranked[:LARGEST_GROUP] if row[0] == head and (padded or row[1] == length)]
        while len(chunk) > least and len(chunk) * block[0] * chunk[-1][1] > pairs:
            chunk.pop()
        if len(chunk) > least:
            del chunk[len(chunk) - len(chunk) % least :]  # as many for each thread
        ranked = ranked[len(chunk) :]
        chunk.sort(key=lambda row: row[2])
        numbers, own = [row[2] for row in chunk], [row[1] for row in chunk]
        keys = order[numbers, : -(-max(own) // block[1])].flatten()
        beside = len(numbers) == 1 and int(keys[-1] - keys[0]) + 1 == len(keys)
        run = (int(keys[0]), len(keys)) if beside else None
        yield _Group(torch.tensor(numbers), keys, own, run)


def _gathered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Sequence[BlockMask], scale: float, backend: str
) -> torch.Tensor:
    block, size = masks[0].block, q.shape[-1]
    queries = _blocks(q * scale if backend == STEPS else q, block[0])
    keys, values = _blocks(k, block[1]), _blocks(v, block[1])
    out = torch.empty_like(queries)
    threads = torch.get_num_threads() if q.device.type == "cpu" else 1
    pairs = PAIRS[backend] * threads if q.device.type == "cpu" else PAIRS_GPU
    scratch = _Scratch(q)
    for mask, q_, k_, v_, answers in zip(masks, queries, keys, values, out, strict=True):
        for group in _plan(mask, pairs, threads, backend == STEPS):
            mine = group.of(q_).view(-1, block[0], size)
            if backend == STEPS:
                answer = _steps(mine, k_, v_, group, scratch)
            else:
                near = [_near(x, group, size, scratch, name)[:, None] for name, x in (("keys", k_), ("values", v_))]
                answer = F.scaled_dot_product_attention(mine[:, None], *near, scale=scale)
            _put(answers, group, answer.reshape(len(group.numbers), -1))
    return out.view(*q.shape[:2], -1, size)[:, :, : q.shape[2]]


def _put(out: torch.Tensor, group: _Group, answer: torch.Tensor) -> None:
    """Writes the answers (g, ...) of a group's query blocks to their places."""
    if len(group.numbers) <= 2:
        group.of(out).copy_(answer)
    else:
        out.index_copy_(0, group.numbers.to(out.device), answer)


class _Scratch:
    """Buffers reused from call to call, because fresh pages cost more than the copy into them."""

    def __init__(self, like: torch.Tensor):
        self._like, self._held = like, {}

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        size = 1
        for side in shape:
            size *= side
        if name not in self._held or self._held[name].numel() < size:
            self._held[name] = self._like.new_empty(size)
        return self._held[name][:size].view(shape)


def _near(blocks: torch.Tensor, group: _Group, size: int, scratch: _Scratch, name: str) -> torch.Tensor:
    """The group's keys or values side by side: (g, length, d)."""
    if group.run:
        first, count = group.run
        return blocks[first : first + count].view(1, -1, size)[:, : group.length]
    held = scratch(name, len(group.keys), blocks.shape[1])
    torch.index_select(blocks, 0, group.keys.to(blocks.device), out=held)
    return held.view(len(group.numbers), -1, size)[:, : group.length]


def _steps(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Group, scratch: _Scratch):
    """Attention of scaled q (g, block, d) in three steps; for few rows faster than the fused kernel of the CPU.

    Values take the place of the keys, which are done with by then, so that less is held in the cache.
    """
    count, block, size = q.shape
    near = _near(keys, group, size, scratch, "near")
    weights = scratch("weights", count, block, group.length)
    torch.bmm(q, near.transpose(1, 2), out=weights)
    for row, length in enumerate(group.lengths):
        if length < group.length:
            weights[row, :, length:] = -torch.inf
    torch.softmax(weights, -1, out=weights)
    near = _near(values, group, size, scratch, "near")
    return torch.bmm(weights, near, out=scratch("answer", count, block, size))
