from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from carnator_core.attention import blocks
from carnator_core.attention.blocks import BlockMask, default_blocks, find_mask, revisit, sample_rows

few = settings(max_examples=25)
sizes = st.integers(1, 70)
seeds = st.integers(0, 2**20)


def tensors(seed: int, heads: int, queries: int, keys: int, d: int = 8, sharp: float = 3.0):
    draw = torch.Generator().manual_seed(seed)
    return sharp * torch.randn(heads, queries, d, generator=draw), torch.randn(heads, keys, d, generator=draw)


def random_mask(
    seed: int, heads: int, block: tuple[int, int], tokens: tuple[int, int], share: float = 0.4
) -> BlockMask:
    draw = torch.Generator().manual_seed(seed)
    shape = BlockMask.full(heads, tokens, block).keep.shape
    keep = torch.rand(shape, generator=draw) < share
    keep.scatter_(-1, torch.randint(shape[-1], (*shape[:2], 1), generator=draw), True)
    return BlockMask(keep, block, tokens)


def true_mass(q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, block: int) -> torch.Tensor:
    """(heads, rows, key blocks) by the definition, with none of the code under test."""
    weights = torch.softmax(q[:, rows].double() @ k.double().transpose(1, 2) * q.shape[-1] ** -0.5, -1)
    return torch.stack([part.sum(-1) for part in weights.split(block, -1)], -1)


@few
@given(seeds, st.integers(1, 5), sizes, sizes, st.integers(1, 9), st.integers(1, 9))
def test_a_packed_mask_unpacks_to_itself(seed, heads, queries, keys, block_q, block_k):
    mask = random_mask(seed, heads, (block_q, block_k), (queries, keys))
    data = mask.packed()
    assert data.dtype == torch.uint8 and data.ndim == 1
    assert data.numel() <= 28 + mask.keep.numel() // 8 + 1
    assert BlockMask.unpack(data) == mask


@few
@given(seeds, st.data())
def test_a_damaged_packed_mask_is_refused_or_another_mask(seed, data):
    mask = random_mask(seed, 3, (4, 2), (21, 23))
    packed = mask.packed()
    packed[data.draw(st.integers(0, packed.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert BlockMask.unpack(packed) != mask
    except ValueError:
        pass
    cut = mask.packed()[: data.draw(st.integers(0, mask.packed().numel() - 1))]
    with pytest.raises(ValueError):
        BlockMask.unpack(cut)


def test_a_packed_mask_claiming_vast_sizes_is_refused_without_allocating_them():
    packed = BlockMask.full(1, (8, 8), (4, 4)).packed()
    packed[8:28] = 255
    with pytest.raises(ValueError, match="bytes"):
        BlockMask.unpack(packed)


@few
@given(
    seeds, sizes, sizes, st.integers(1, 16), st.integers(1, 16), st.floats(0.05, 0.999), st.sampled_from([1 / 16, 1])
)
def test_the_kept_mass_is_reached_by_the_smallest_set(seed, queries, keys, block_q, block_k, kept, share):
    q, k = tensors(seed, 2, queries, keys)
    mask = find_mask(q, k, kept=kept, floor=0, block=(block_q, block_k), rows=share)
    for i, rows in enumerate(sample_rows(queries, block_q, share)):
        mass = true_mass(q, k, rows, block_k).mean(1)
        inside = (mass * mask.keep[:, i]).sum(-1)
        assert (inside >= kept - 1e-5).all()
        count = mask.keep[:, i].sum(-1)
        for head in range(2):  # no smaller set would do
            best = mass[head].sort(descending=True).values[: int(count[head]) - 1].sum()
            assert best < kept + 1e-5


@few
@given(sizes, st.integers(1, 40), st.floats(0.01, 1), seeds)
def test_sampled_rows_stay_within_their_bound(tokens, block, share, seed):
    rows = sample_rows(tokens, block, share, seed)
    assert len(rows) == -(-tokens // block)
    for i, part in enumerate(rows):
        length = min(block, tokens - i * block)
        assert 1 <= len(part) <= max(1, share * length)
        assert len(part.unique()) == len(part)
        assert part.min() >= i * block and part.max() < i * block + length


def test_sampled_rows_take_no_more_than_a_sixteenth_of_a_long_clip_and_meet_every_column():
    rows = torch.cat(sample_rows(4608, 128))
    assert len(rows) <= 4608 / 16
    assert len((rows % 16).unique()) == 16


@few
@given(seeds, st.floats(0.1, 1), st.floats(0.1, 1))
def test_density_grows_with_the_kept_mass(seed, one, other):
    q, k = tensors(seed, 2, 40, 48)
    low, high = (find_mask(q, k, kept=kept, block=(8, 4)) for kept in sorted((one, other)))
    assert low.density <= high.density
    assert not (low.keep & ~high.keep).any()


@few
@given(seeds, st.floats(0, 1))
def test_the_floor_holds_for_every_query_block(seed, floor):
    q, k = tensors(seed, 3, 30, 64, sharp=20.0)
    mask = find_mask(q, k, kept=0.5, floor=floor, block=(8, 4))
    assert (mask.keep.sum(-1) >= max(1, round(floor * 16))).all()


@few
@given(seeds, st.data())
def test_text_is_always_kept_and_its_mass_counts(seed, data):
    q, k = tensors(seed, 2, 30, 50, sharp=8.0)
    start = data.draw(st.integers(0, 49))
    stop = data.draw(st.integers(start + 1, 50))
    mask = find_mask(q, k, kept=0.6, floor=0, block=(8, 4), text=[(start, stop)], rows=1)
    assert mask.elements()[:, :, start:stop].all()
    mass = torch.stack([true_mass(q, k, r, 4).mean(1) for r in sample_rows(30, 8, 1)], 1)
    text = torch.zeros(13, dtype=torch.bool)
    text[start // 4 : -(-stop // 4)] = True
    enough = (mass * text).sum(-1) > 0.6 + 1e-5
    assert (mask.keep.sum(-1)[enough] == text.sum()).all()


def test_a_kept_mass_of_one_keeps_everything():
    q, k = tensors(0, 2, 40, 40, sharp=30.0)
    assert find_mask(q, k, kept=1.0, block=(8, 8)).density == 1


@few
@given(seeds)
def test_permuted_heads_give_permuted_masks(seed):
    q, k = tensors(seed, 4, 40, 40)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    one, other = find_mask(q, k, block=(8, 8)), find_mask(q[order], k[order], block=(8, 8))
    assert torch.equal(one.keep[order], other.keep)


def test_the_attention_matrix_is_never_whole(monkeypatch):
    tokens, largest = 2048, 0
    q, k = tensors(0, 2, tokens, tokens)
    monkeypatch.setattr(blocks, "SCRATCH", 4 * tokens * 8)
    inner = torch.Tensor.softmax

    def watched(self, *args, **kwargs):
        nonlocal largest
        largest = max(largest, self.numel())
        return inner(self, *args, **kwargs)

    whole = find_mask(q, k)
    monkeypatch.setattr(torch.Tensor, "softmax", watched)
    assert find_mask(q, k) == whole
    assert 0 < largest <= tokens * 8


@few
@given(seeds, st.integers(1, 20), st.integers(1, 9))
def test_revisiting_visits_every_pair_in_each_group_and_takes_nothing_away(seed, layers, group):
    masks = [random_mask(seed + i, 2, (4, 4), (17, 23), 0.2) for i in range(layers)]
    before = [mask.keep.clone() for mask in masks]
    after = revisit(masks, group)
    assert len(after) == layers
    for old, kept, new in zip(before, masks, after, strict=True):
        assert torch.equal(old, kept.keep)  # the given masks are left alone
        assert not (old & ~new.keep).any()
    longest = -(-layers // max(1, round(layers / group)))
    window = 2 * longest - 1  # any so many consecutive layers hold a whole group
    for start in range(max(1, layers - window + 1)):
        assert torch.stack([m.keep for m in after[start : start + window]]).any(0).all()


def test_revisiting_leaves_no_lone_layer_to_become_dense():
    masks = [random_mask(i, 2, (4, 4), (64, 64), 0.3) for i in range(9)]
    assert max(mask.density for mask in revisit(masks, 8)) < 0.5


def test_blocks_shrink_with_the_clip():
    assert default_blocks(32_760) == (128, 64)
    found = [default_blocks(n) for n in (64, 1000, 1560, 4608)]
    assert found == sorted(found) and found[0] == (32, 16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kept": 0}, "kept"),
        ({"kept": 1.1}, "kept"),
        ({"kept": float("nan")}, "kept"),
        ({"floor": -0.1}, "floor"),
        ({"rows": 0}, "rows"),
        ({"block": (0, 4)}, "block sizes"),
        ({"text": [(30, 50)]}, "text range"),
        ({"text": [(5, 5)]}, "text range"),
        ({"q": torch.zeros(1, 2, 40, 8)}, "heads, tokens, d"),
        ({"q": torch.zeros(3, 40, 8)}, "equal heads"),
        ({"q": torch.full((2, 40, 8), float("nan"))}, "non-finite"),
        ({"q": torch.zeros(2, 0, 8)}, "nothing"),
    ],
)
def test_bad_inputs_are_named(change, words):
    q, k = tensors(0, 2, 40, 40)
    arguments = {"q": q, "k": k, "block": (8, 8), **change}
    with pytest.raises(ValueError, match=words):
        find_mask(**arguments)


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (torch.ones(2, 3, 4), "bool"),
        (torch.ones(3, 4, dtype=torch.bool), "bool"),
        (torch.ones(2, 3, 5, dtype=torch.bool), "does not fit"),
        (torch.ones(0, 3, 4, dtype=torch.bool), "does not fit"),
        (torch.zeros(2, 3, 4, dtype=torch.bool), "no key block"),
    ],
)
def test_a_mask_that_means_nothing_is_refused(keep, words):
    with pytest.raises(ValueError, match=words):
        BlockMask(keep, (8, 8), (24, 32))


def test_revisiting_refuses_unlike_layers():
    with pytest.raises(ValueError, match="layers"):
        revisit([BlockMask.full(2, (16, 16), (4, 4)), BlockMask.full(2, (16, 16), (8, 4))])
    with pytest.raises(ValueError, match="at least one"):
        revisit([BlockMask.full(2, (16, 16), (4, 4))], 0)
