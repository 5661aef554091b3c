"""Packed predictions: near, small, and refused where they are not what was written."""

from __future__ import annotations

import tracemalloc
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from carnator_core.bank.packing import STEP, pack, unpack


def course(levels: int, seed: int = 0, size: int = 16) -> torch.Tensor:
    """A denoising-like course: far changes first, ever smaller ones later."""
    draw = torch.Generator().manual_seed(seed)
    steps = torch.randn(levels, 4, 2, size, size, generator=draw) * 0.5 ** torch.arange(levels).view(-1, 1, 1, 1, 1)
    return steps.cumsum(0).half()


@settings(max_examples=60)
@given(
    levels=st.integers(1, 9),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
    jump=st.sampled_from([0.0, 50.0]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_every_value_comes_back_within_three_quarters_of_a_step(levels, seed, scale, jump, dtype):
    predictions = course(levels, seed, size=3).float() * scale
    predictions[levels // 2 :, 0, 0, 0, 0] += jump * scale  # one change wider than a byte
    predictions = predictions.to(dtype)
    found = unpack(pack(predictions))
    assert found.dtype == dtype and found.shape == predictions.shape and torch.equal(found[0], predictions[0])
    step = STEP * max(float(level.double().std(correction=0)) for level in predictions)
    rounding = torch.finfo(dtype).eps * float(predictions.abs().max())
    assert float((found.double() - predictions.double()).abs().max()) <= 0.75 * step + rounding


def test_a_slow_course_comes_back_finer_than_it_was_written():
    draw = torch.Generator().manual_seed(0)
    slope, bend, start = torch.randn(3, 1, 4, 2, 16, 16, generator=draw).unbind(0)
    along = torch.linspace(0, 1, 40).view(-1, 1, 1, 1, 1)
    predictions = start + 0.2 * slope * along + 0.1 * bend * along**2
    found = unpack(pack(predictions))
    step = STEP * max(float(level.std(correction=0)) for level in predictions)
    wrong = (found - predictions)[2:-2] / step
    assert wrong.pow(2).mean().sqrt() < 0.24  # rounding alone leaves 1 / sqrt(12) = 0.29
    extrapolated = 3 * wrong[2:] - 3 * wrong[1:-1] + wrong[:-2]
    assert extrapolated.pow(2).mean().sqrt() < 0.8  # and 1.26 here


@pytest.mark.parametrize("value", [0.0, 7.0])
def test_levels_without_detail_come_back(value):
    flat = torch.stack([torch.full((2, 3), value), torch.full((2, 3), value + 3)]).half()
    assert torch.equal(unpack(pack(flat)), flat)


def test_a_course_takes_a_fraction_of_its_16_bits():
    predictions = course(12, size=64)
    packed = pack(predictions)
    bits = 8 * sum(t.numel() * t.element_size() for t in packed.values()) / predictions.numel()
    assert bits < 5


@pytest.mark.parametrize("harm", ["cut", "flip", "more", "width", "step"])
def test_what_was_never_written_is_refused(harm):
    packed = pack(course(5))
    changes = packed["changes"]
    if harm == "cut":
        packed["changes"] = changes[:-20]
    if harm == "flip":
        changes[len(changes) // 2] ^= 255
    if harm == "more":
        packed["widths"] = torch.cat((packed["widths"], packed["widths"][-1:]))
    if harm == "width":
        packed["widths"][0] = 3
    if harm == "step":
        packed["step"][0] = float("inf")
    with pytest.raises(ValueError, match="never written|damaged|instead of"):
        unpack(packed)


def test_no_more_is_inflated_than_belongs_there():
    packed = pack(course(5))
    packed["changes"] = torch.frombuffer(bytearray(zlib.compress(bytes(2**26))), dtype=torch.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="instead of"):
            unpack(packed)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
