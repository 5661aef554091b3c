"""Which kernel answers an attention: the host's own dense one unless a sparse one measures faster on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from .blocks import BlockMask
from .kernels import backends, sparse_attention

Dense = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MARGIN = 1.05  # sparse must be faster by this factor, for a tie is not worth the approximation
BUCKETS = 20  # densities are told apart in steps of 1 / BUCKETS
ROUNDS, SECONDS = 3, 2.0  # timing ends after so many rounds, or with the round that passes so many seconds


@dataclass(frozen=True)
class Choice:
    """`backend` is the kernel's name, or None for dense; `speedup` is over dense (the best found, even if below 1)."""

    backend: str | None
    speedup: float
    reason: str


class Chooser:
    """Times dense against sparse once per shape, dtype, device and density, and remembers for as long as it lives."""

    def __init__(self) -> None:
        self._known: dict[tuple, Choice] = {}

    def choose(self, dense: Dense, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> Choice:
        """The kernel for this attention. `dense(q, k, v)` is the host's own; layouts as in `sparse_attention`."""
        # Rounded up, so that a bucket's verdict is never better than what its densest mask would get by much.
        bucket = -int(-mask.density * BUCKETS // 1)
        key = (tuple(q.shape), tuple(k.shape), q.dtype, q.device, mask.heads, mask.block, bucket)
        if key not in self._known:
            self._known[key] = self._measure(dense, q, k, v, mask)
        return self._known[key]

    def attend(self, dense: Dense, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        """The attention by the chosen kernel; the host's own answer, untouched, where sparse does not win."""
        backend = self.choose(dense, q, k, v, mask).backend
        return dense(q, k, v) if backend is None else sparse_attention(q, k, v, mask, backend=backend)

    def _measure(self, dense: Dense, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> Choice:
        if mask.density == 1:
            return Choice(None, 1.0, "attention stays dense: the mask keeps every block")
        calls = {None: partial(dense, q, k, v)}
        calls |= {name: partial(sparse_attention, q, k, v, mask, backend=name) for name in backends(q)}
        seconds = _fastest(calls, q.device)
        own = seconds.pop(None)
        best = min(seconds, key=seconds.get)
        speedup = own / seconds[best]
        told = f"{speedup:.2f} times dense at {mask.density:.0%} of the blocks, {q.shape[-2]} tokens"
        if speedup < MARGIN:
            return Choice(None, speedup, f"attention stays dense: the kernel {best!r} measures {told}")
        return Choice(best, speedup, f"the kernel {best!r} measures {told}")


def _fastest(calls: dict, device: torch.device) -> dict:
    """The shortest time of each call in seconds; interleaved, so that a busy machine burdens all alike."""
    shortest = dict.fromkeys(calls, float("inf"))
    started = time.perf_counter()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            shortest[name] = min(shortest[name], timed(call, device))
        if time.perf_counter() - started > SECONDS:
            break
    return shortest


def timed(call: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that a call takes, its queued work on the device included."""
    _finish(device)
    start = clock()
    call()
    _finish(device)
    return clock() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
