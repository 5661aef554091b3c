from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from carnator_core.attention import BlockMask, coverage, find_mask

few = settings(max_examples=25)
sizes = st.integers(1, 70)


def tensors(seed: int, queries: int, keys: int):
    draw = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(2, queries, 8, generator=draw), torch.randn(2, keys, 8, generator=draw)


@few
@given(st.integers(0, 2**20), sizes, sizes, st.integers(1, 16), st.integers(1, 16), st.floats(0.05, 1))
def test_a_mask_from_all_rows_covers_at_least_what_it_kept(seed, queries, keys, block_q, block_k, kept):
    q, k = tensors(seed, queries, keys)
    mask = find_mask(q, k, kept=kept, floor=0, block=(block_q, block_k), rows=1)
    found = coverage(q, k, mask, rows=1)
    assert found.worst >= kept - 1e-5
    assert found.mean == pytest.approx(sum(found.heads) / 2) and found.worst == min(found.heads)


@few
@given(st.integers(0, 2**20), sizes, sizes)
def test_coverage_of_all_rows_is_the_mass_inside_the_mask(seed, queries, keys):
    q, k = tensors(seed, queries, keys)
    mask = find_mask(q, k, kept=0.6, floor=0, block=(8, 4))
    weights = torch.softmax(q.double() @ k.double().transpose(1, 2) * 8**-0.5, -1)
    wanted = (weights * mask.elements()).sum(-1).mean(-1)
    torch.testing.assert_close(torch.tensor(coverage(q, k, mask, rows=1).heads), wanted.float(), atol=1e-5, rtol=1e-5)


def test_a_full_mask_covers_everything():
    q, k = tensors(0, 100, 90)
    assert coverage(q, k, BlockMask.full(2, (100, 90), (16, 8))).worst == pytest.approx(1, abs=1e-5)


def test_coverage_looks_at_other_rows_than_those_the_mask_was_made_from():
    draw = torch.Generator().manual_seed(0)
    q, k = 6 * torch.randn(2, 512, 16, generator=draw), torch.randn(2, 512, 16, generator=draw)
    mask = find_mask(q, k, kept=0.8, floor=0, block=(64, 16))
    own, held_out = coverage(q, k, mask, seed=0).mean, coverage(q, k, mask).mean
    exact = coverage(q, k, mask, rows=1).mean
    assert own >= 0.8 - 1e-5
    assert abs(held_out - exact) < own - exact  # unstructured attention: its own rows flatter the mask


def test_a_mask_of_another_request_covers_less_than_the_own_one():
    q, k = tensors(0, 256, 256)
    other = find_mask(*tensors(1, 256, 256), kept=0.9, floor=0, block=(16, 8))
    own = find_mask(q, k, kept=0.9, floor=0, block=(16, 8))
    assert coverage(q, k, other, rows=1).mean < coverage(q, k, own, rows=1).mean


def test_a_mask_of_another_shape_is_refused():
    q, k = tensors(0, 64, 64)
    with pytest.raises(ValueError, match="heads and"):
        coverage(q, k, BlockMask.full(2, (64, 65), (16, 8)))
    with pytest.raises(ValueError, match="heads and"):
        coverage(q, k, BlockMask.full(3, (64, 64), (16, 8)))
