"""What taps and evidence compute from attention does not depend on how much memory they may take."""

from __future__ import annotations

import pytest
import torch

from carnator_core.grid import TokenGrid
from carnator_core.signature import taps
from carnator_core.signature.evidence import expand, fused
from carnator_core.signature.taps import MOST_HEADS, Taps, text_attention

GRID = TokenGrid(2, 6, 7)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scratch", [1, 5_000, 2**26])
def test_text_attention_is_the_softmax_over_all_text_rows(scratch, monkeypatch):
    monkeypatch.setattr(taps, "SCRATCH", scratch)
    q, k = rand(3, GRID.tokens, 8), rand(3, 10, 8, seed=1)
    whole = torch.softmax(q @ k.mT * 8**-0.5, -1).mean(0)[:, :6].mT
    assert torch.allclose(text_attention(q, k, 6), whole, atol=1e-6)


@pytest.mark.parametrize("scratch", [1, 5_000, 2**26])
def test_expansion_is_the_same_in_any_pieces(scratch, monkeypatch):
    monkeypatch.setattr(taps, "SCRATCH", scratch)
    q, k = rand(3, GRID.tokens, 8), rand(3, GRID.tokens, 8, seed=1)
    seeds, noise = torch.tensor([4, 9, 30]), torch.tensor([0, 1, 2])
    logits = q @ k.mT * 8**-0.5
    whole = torch.tanh(logits[..., seeds].amax(-1) - logits[..., noise].amax(-1)).mean(0)
    assert torch.allclose(expand(seeds, noise, q, k), whole, atol=1e-6)
    assert fused(rand(2, 6, 7).sigmoid(), (q, k)).shape == (2, 6, 7)


def test_copies_of_queries_and_keys_are_bounded_and_the_hosts_buffers_are_not_kept():
    read = Taps(GRID, 4)
    q = rand(40, GRID.tokens, 8)
    read.read_self(q, q)
    kept, _ = read.self_qk
    assert len(kept) == MOST_HEADS and torch.equal(kept, q[::5])
    q.zero_()
    assert kept.abs().sum() > 0
    read.release()
    assert read.self_qk is None
