from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from carnator_core.attention import BlockMask, Chooser, bench, find_mask, kernels, sparse_attention
from carnator_core.attention.flex import _table, why_not

few = settings(max_examples=40)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
seeds = st.integers(0, 2**20)


def tensors(seed: int, batch: int, heads: int, queries: int, keys: int, d: int, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    lengths = (queries, keys, keys)
    return [torch.randn(batch, heads, n, d, generator=draw).to(dtype) for n in lengths]


def random_mask(seed: int, heads: int, block: tuple[int, int], tokens: tuple[int, int]) -> BlockMask:
    """Heads from nearly empty to full, so that the counts of key blocks differ."""
    draw = torch.Generator().manual_seed(seed)
    shape = BlockMask.full(heads, tokens, block).keep.shape
    keep = torch.rand(shape, generator=draw) < torch.rand(heads, 1, 1, generator=draw) * 1.2
    keep.scatter_(-1, torch.randint(shape[-1], (*shape[:2], 1), generator=draw), True)
    return BlockMask(keep, block, tokens)


def reference(q, k, v, masks, scale=None):
    """Dense attention in double precision with minus infinity outside the mask."""
    allowed = torch.stack([mask.elements() for mask in masks])
    scores = q.double() @ k.double().transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v.double()


def assert_equal(found, wanted, dtype):
    assert found.dtype == dtype and found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@few
@given(
    seeds,
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 80),
    st.integers(1, 80),
    st.sampled_from([1, 5, 8, 64, 72]),
    st.sampled_from([(8, 4), (4, 8), (7, 5), (100, 100), (16, 1)]),
    st.sampled_from(list(TOLERANCE)),
)
def test_sparse_equals_dense_under_the_same_mask(seed, batch, heads, queries, keys, d, block, dtype):
    q, k, v = tensors(seed, batch, heads, queries, keys, d, dtype)
    mask = random_mask(seed, heads, block, (queries, keys))
    wanted = reference(q, k, v, [mask] * batch)
    for backend in kernels.backends(q):
        assert_equal(sparse_attention(q, k, v, mask, backend=backend), wanted, dtype)


@few
@given(seeds, st.integers(1, 2), st.integers(1, 90), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_full_mask_is_dense_attention(seed, batch, tokens, dtype):
    q, k, v = tensors(seed, batch, 2, tokens, tokens, 16, dtype)
    found = sparse_attention(q, k, v, BlockMask.full(2, (tokens, tokens), (16, 8)))
    wanted = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(found, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@few
@given(seeds, st.permutations(range(4)))
def test_permuting_the_heads_permutes_the_answer(seed, order):
    q, k, v = tensors(seed, 2, 4, 40, 44, 8)
    mask = random_mask(seed, 4, (8, 4), (40, 44))
    found = sparse_attention(q[:, order], k[:, order], v[:, order], mask.with_keep(mask.keep[order]))
    torch.testing.assert_close(found, sparse_attention(q, k, v, mask)[:, order], atol=1e-6, rtol=1e-5)


@few
@given(seeds)
def test_keys_outside_the_mask_change_nothing(seed):
    q, k, v = tensors(seed, 1, 1, 16, 64, 8)
    mask = random_mask(seed, 1, (16, 4), (16, 64))
    outside = ~mask.elements()[0, 0]
    other_k, other_v = k.clone(), v.clone()
    other_k[:, :, outside], other_v[:, :, outside] = torch.nan, torch.inf
    assert torch.equal(sparse_attention(q, other_k, other_v, mask), sparse_attention(q, k, v, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_layouts_agree_and_strided_inputs_are_taken(dtype):
    q, k, v = tensors(0, 2, 4, 50, 60, 16, dtype)
    mask = random_mask(0, 4, (8, 8), (50, 60))
    wanted = sparse_attention(q, k, v, mask)
    flat = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
    found = sparse_attention(*flat, mask)
    assert found.shape == (2, 50, 64) and torch.equal(found, wanted.transpose(1, 2).flatten(2))
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(sparse_attention(*strided, mask), wanted)


def test_each_element_of_a_batch_may_have_its_own_mask_and_any_scale():
    q, k, v = tensors(0, 2, 3, 40, 40, 8)
    masks = [random_mask(seed, 3, (8, 4), (40, 40)) for seed in (1, 2)]
    assert_equal(sparse_attention(q, k, v, masks, scale=0.7), reference(q, k, v, masks, 0.7), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_met_again_answers_as_the_first_time(dtype):
    """Every step meets the same masks with other tensors, alone or within a batch."""
    masks = [random_mask(seed, 3, (8, 4), (70, 50)) for seed in (1, 2)]
    for seed in range(3):
        q, k, v = tensors(seed, 2, 3, 70, 50, 16, dtype)
        for backend in kernels.backends(q):
            for order in (masks, masks[::-1]):
                wanted = reference(q, k, v, order)
                assert_equal(sparse_attention(q, k, v, order, backend=backend), wanted, dtype)
    longer = [x.repeat(1, 1, 1, 2) for x in tensors(9, 1, 3, 70, 50, 4, dtype)]  # another head size, the same mask
    assert_equal(sparse_attention(*longer, masks[0]), reference(*longer, masks[:1]), dtype)


def test_a_mask_keeps_the_work_of_ordering_its_blocks():
    q, k, v = tensors(0, 2, 3, 70, 50, 16)
    mask = random_mask(1, 3, (8, 4), (70, 50))
    first = sparse_attention(q, k, v, mask)
    assert mask.plans and not mask.with_keep(mask.keep).plans and not mask.to("cpu").plans
    plans = dict(mask.plans)
    assert torch.equal(sparse_attention(q, k, v, mask), first)
    assert all(mask.plans[key] is plan for key, plan in plans.items()) and len(mask.plans) == len(plans)
    assert mask == mask.with_keep(mask.keep) and torch.equal(mask.packed(), mask.with_keep(mask.keep).packed())


def test_a_joint_sequence_with_its_text_kept():
    q, k, v = tensors(0, 1, 2, 300, 300, 16)
    mask = find_mask(3 * q[0], k[0], kept=0.5, floor=0, block=(32, 16), text=[(277, 300)])
    assert mask.density < 0.7
    assert_equal(sparse_attention(q, k, v, mask), reference(q, k, v, [mask]), torch.float32)


@pytest.mark.parametrize("pairs", [1, 2**12, 2**30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_size_of_the_groups_does_not_matter(monkeypatch, pairs, dtype):
    monkeypatch.setattr(kernels, "PAIRS", dict.fromkeys(kernels.PAIRS, pairs))
    q, k, v = tensors(0, 2, 3, 130, 90, 16, dtype)
    mask = random_mask(0, 3, (8, 4), (130, 90))
    assert_equal(sparse_attention(q, k, v, mask), reference(q, k, v, [mask] * 2), dtype)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(2, 3, 40, 9)}, "fit together"),
        ({"v": torch.zeros(2, 3, 41, 8)}, "fit together"),
        ({"k": torch.zeros(2, 3, 40, 8, dtype=torch.float16)}, "dtype"),
        ({"q": torch.zeros(2, 3, 48, 8)}, "does not fit"),
        ({"mask": BlockMask.full(2, (40, 40), (8, 8))}, "does not fit"),
        ({"mask": []}, "no mask"),
        ({"mask": [BlockMask.full(3, (40, 40), (8, 8))] * 3}, "batch of 2"),
        ({"mask": [BlockMask.full(3, (40, 40), (8, 8)), BlockMask.full(3, (40, 40), (8, 4))]}, "blocks"),
        ({"q": torch.zeros(2, 3, 40, 8, requires_grad=True)}, "no gradient"),
        ({"backend": "other"}, "no back end"),
        ({"q": torch.zeros(2, 40, 25)}, "heads"),
    ],
)
def test_bad_inputs_are_named(change, words):
    q, k, v = tensors(0, 2, 3, 40, 40, 8)
    arguments = {"q": q, "k": k, "v": v, "mask": BlockMask.full(3, (40, 40), (8, 8)), **change}
    with pytest.raises(ValueError, match=words):
        sparse_attention(**arguments)


def test_float32_on_the_cpu_has_two_back_ends_and_half_precision_one():
    q, k, v = tensors(0, 1, 2, 40, 40, 8, torch.bfloat16)
    assert kernels.backends(q) == ["fused"] and kernels.backends(q.float()) == ["steps", "fused"]
    mask = BlockMask.full(2, (40, 40), (8, 8))
    assert torch.equal(sparse_attention(q, k, v, mask), sparse_attention(q, k, v, mask, backend="portable"))
    with pytest.raises(RuntimeError, match="float32"):
        sparse_attention(q, k, v, mask, backend="steps")


def test_the_flex_back_end_says_why_it_cannot_run_here():
    q, k, v = tensors(0, 1, 2, 40, 40, 8)
    with pytest.raises(RuntimeError, match="CUDA only"):
        sparse_attention(q, k, v, BlockMask.full(2, (40, 40), (8, 8)), backend="flex")
    assert "CUDA only" in why_not(torch.device("cpu"))


def test_the_flex_table_lists_exactly_the_kept_blocks():
    mask = random_mask(0, 3, (8, 4), (50, 61))
    table = _table([mask], torch.device("cpu"))
    assert torch.equal(table.to_dense()[0].bool(), mask.keep)


class Host:
    """A host's dense attention that counts its calls and can be slowed down."""

    def __init__(self, repeats: int):
        self.repeats, self.calls = repeats, 0

    def __call__(self, q, k, v):
        self.calls += 1
        for _ in range(self.repeats):
            out = F.scaled_dot_product_attention(q, k, v)
        return out


def test_sparse_is_chosen_where_it_wins_and_measured_once():
    q, k, v = tensors(0, 1, 2, 512, 512, 32)
    mask = bench.random_mask(2, 512, (32, 16), 0.2)
    host, chooser = Host(repeats=200), Chooser()
    choice = chooser.choose(host, q, k, v, mask)
    assert choice.backend in kernels.backends(q) and choice.speedup > 1.05 and "times dense" in choice.reason
    measured = host.calls
    assert torch.equal(chooser.attend(host, q, k, v, mask), sparse_attention(q, k, v, mask, backend=choice.backend))
    assert chooser.choose(host, q, k, v, bench.random_mask(2, 512, (32, 16), 0.2, seed=5)) is choice
    assert host.calls == measured
    chooser.choose(host, q, k, v, bench.random_mask(2, 512, (32, 16), 0.5))
    assert host.calls > measured  # another density is another question


def test_dense_stays_the_hosts_own_where_sparse_does_not_win():
    q, k, v = tensors(0, 1, 2, 64, 64, 8)
    mask = bench.random_mask(2, 64, (8, 4), 0.9)
    chooser = Chooser()

    def host(q, k, v):
        return v  # takes no time at all

    choice = chooser.choose(host, q, k, v, mask)
    assert choice.backend is None and choice.reason.startswith("attention stays dense")
    assert chooser.attend(host, q, k, v, mask) is v


def test_a_full_mask_is_never_timed():
    q, k, v = tensors(0, 1, 2, 64, 64, 8)
    host = Host(repeats=1)
    choice = Chooser().choose(host, q, k, v, BlockMask.full(2, (64, 64), (8, 8)))
    assert choice.backend is None and "every block" in choice.reason and host.calls == 0


@pytest.mark.parametrize("kind", bench.MADE)
@pytest.mark.parametrize("density", [0.15, 0.3])
def test_bench_masks_have_the_density_asked_for_and_unequal_counts(kind, density):
    mask = bench.MADE[kind](4, 2304, (128, 64), density)
    assert mask.density == pytest.approx(density, abs=0.03)
    assert len(mask.keep.sum(-1).unique()) > 2


def test_the_bench_prints_rows(capsys):
    arguments = "--tokens 300 --density 0.3 --mask random window --heads 2 --head-dim 16 --repeats 1 --json"
    assert bench.main(arguments.split()) == 0
    data = json.loads(capsys.readouterr().out)
    cases = [(row["mask"], row["backend"]) for row in data["rows"]]
    assert cases == [(mask, name) for mask in ("random", "window") for name in ("steps", "fused")]
    for row in data["rows"]:
        assert set(bench.COLUMNS) <= set(row)
        assert row["speedup"] > 0 and row["max_error"] < 1e-4
    for mask in ("random", "window"):
        own = [row["speedup"] for row in data["rows"] if row["mask"] == mask]
        assert data["geometric_mean"][f"fastest {mask} 0.3"] == pytest.approx(max(own), abs=2e-3)


def test_the_bench_takes_a_real_run_s_tensors_under_the_masks_found_in_them(capsys):
    assert bench.main("--tokens 300 --density 0.3 0.6 --mask recorded --heads 5 --repeats 1 --json".split()) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["mask"], row["tokens"], row["heads"], row["head_dim"]) for row in rows} == {("recorded", 320, 2, 128)}
    for row in rows:
        assert row["density"] == pytest.approx(row["target"], abs=0.05)
        assert row["speedup"] > 0 and row["max_error"] < 1e-4


@pytest.mark.parametrize("arguments", ["--tokens 0", "--density 1.5", "--dtype int8", "--mask none", "--heads x"])
def test_the_bench_refuses_bad_arguments(arguments):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments.split())
    assert stopped.value.code == 2


def test_the_bench_refuses_a_back_end_that_does_not_run_here(capsys):
    assert bench.main("--tokens 64 --backend steps --dtype bfloat16".split()) == 2
    assert "steps" in capsys.readouterr().err


def test_the_bench_names_a_device_that_is_not_there(capsys):
    assert bench.main(["--device", "cuda:99", "--tokens", "64"]) == 2
    assert "cuda:99" in capsys.readouterr().err
