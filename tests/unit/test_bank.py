"""The bank from the outside: round trips, refusals, recall, eviction, the index."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carnator_core.bank import Bank, entry_id, packing
from carnator_core.bank.eviction import HALF_LIFE_SECONDS, value, victims
from carnator_core.bank.index import Row
from tests.unit.test_bank_support import COMPUTED, SHAPE, draft, index_equals_folder, request, rows, used_bytes


@pytest.fixture
def bank(tmp_path):
    with Bank(tmp_path / "bank") as made:
        yield made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_round_trip_is_bit_equal(bank, dtype):
    made = draft(1)
    made.result = made.result.to(dtype)
    one = bank.write(made)
    assert one == entry_id(made.request) and not bank.warnings
    with Bank(bank.root) as other:
        result = other.result(one)
        assert result.dtype == dtype and torch.equal(result, made.result)
        entry = other.open(one)
        assert set(entry.signature) == {"states", "count"}
        assert torch.equal(entry.signature["states"], made.signature["states"])
        assert nearly(entry.predictions(), made.predictions.half())
        assert torch.equal(entry.result(), made.result)
        assert entry.sigmas == (0.9, 0.6, 0.3, 0.1)


def nearly(found: torch.Tensor, predictions: torch.Tensor) -> bool:
    """Whether all values came back within half a step, and the first level bit for bit."""
    step = packing.STEP * max(float(level.double().std(correction=0)) for level in predictions)
    rounding = torch.finfo(predictions.dtype).eps * float(predictions.abs().max())
    far = (found.double() - predictions.double()).abs().max()
    return torch.equal(found[0], predictions[0]) and float(far) <= step / 2 + rounding


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_predictions_keep_their_dtype(bank, dtype):
    made = draft(1)
    made.predictions = made.predictions.to(dtype)
    found = bank.open(bank.write(made)).predictions()
    assert found.dtype == dtype and nearly(found, made.predictions)


def test_finite_values_whose_sum_is_not_are_kept(bank):
    made = draft(1)
    made.predictions = torch.full_like(made.predictions, 3e38).to(torch.bfloat16)
    assert torch.equal(bank.open(bank.write(made)).predictions(), made.predictions)


def test_large_predictions_are_kept_in_bfloat16(bank):
    made = draft(1)
    made.predictions = made.predictions * 1e6
    assert bank.open(bank.write(made)).predictions().dtype == torch.bfloat16


def test_views_and_shared_memory_can_be_written(bank):
    made = draft(1)
    base = torch.randn(8, 3)
    made.signature = {"a": base[:4], "b": base[:4], "c": base.T}
    made.result = made.predictions[-1]
    entry = bank.open(bank.write(made))
    assert torch.equal(entry.signature["c"], base.T) and torch.equal(entry.result(), made.result)


def test_exact_needs_identity_and_profile(bank):
    one = bank.write(draft(1))
    info = bank.exact(request(1))
    assert info.id == one and info.prompt == "prompt 1" and info.seed == 1 and info.dense_seconds == 60.0
    assert info.identity == request(1).identity and info.provenance == COMPUTED
    assert bank.exact(request(2)) is None
    assert bank.exact(request(1, weights="other")) is None


def test_same_request_keeps_its_first_entry(bank):
    first = draft(1)
    one = bank.write(first)
    assert bank.write(draft(1, result=first.result + 1)) == one
    assert torch.equal(bank.result(one), first.result)
    index_equals_folder(bank)


def _nan(tensor):
    broken = tensor.clone()
    broken.view(-1)[3] = float("nan")
    return broken


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"provenance": {**COMPUTED, "computed": False}}, "never becomes a donor"),
        ({"provenance": {**COMPUTED, "computed": 1}}, "never becomes a donor"),
        ({"provenance": {"decision": "miss"}}, "never becomes a donor"),
        ({"provenance": {**COMPUTED, "decision": "joint"}}, "makes no donor"),
        ({"provenance": {**COMPUTED, "decision": "something"}}, "makes no donor"),
        ({"provenance": {**COMPUTED, "x": float("nan")}}, "plain finite JSON"),
        ({"provenance": {**COMPUTED, "x": torch.ones(1)}}, "plain finite JSON"),
        ({"predictions": _nan(torch.zeros(4, *SHAPE))}, "non-finite"),
        ({"result": _nan(torch.zeros(SHAPE))}, "non-finite"),
        ({"signature": {"s": torch.tensor([float("inf")])}}, "non-finite"),
        ({"signature": {"bank.text": torch.ones(2)}}, "bank's own"),
        ({"predictions": torch.zeros(4, 1, 1)}, "latent shape"),
        ({"result": torch.zeros(2)}, "latent shape"),
        ({"prediction_sigmas": (0.9, 0.6, 0.3)}, "every prediction"),
        ({"prediction_sigmas": (0.1, 0.3, 0.6, 0.9)}, "descend"),
        ({"prediction_sigmas": (float("nan"), 0.6, 0.3, 0.1)}, "finite"),
        ({"request": request(1, text=torch.full((2, 4), float("nan")))}, "non-finite"),
    ],
)
def test_refused_drafts_leave_a_reason_and_no_file(bank, caplog, change, reason):
    with caplog.at_level(logging.WARNING, logger="carnator"):
        assert bank.write(draft(1, **change)) is None
        assert bank.write(draft(1, **change)) is None
    assert reason in bank.warnings[-1]
    assert len(caplog.records) == 1
    assert not list(bank.root.rglob("*.safetensors"))


def test_provenance_with_number_keys_stays_readable(bank):
    one = bank.write(draft(1, provenance={**COMPUTED, "steps_by": {10: 1, 9: 2}}))
    assert bank.verify() == {one: None}


def test_modes(tmp_path):
    with Bank(tmp_path) as bank:
        one = bank.write(draft(1))
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "entries").rglob("*")}
    with Bank(tmp_path, mode="read-only") as bank:
        assert bank.exact(request(1)) and bank.recall(request(1)) and bank.open(one).predictions() is not None
        assert bank.write(draft(2)) is None and not bank.remove(one) and "read-only" in bank.warnings[-1]
        bank.touch(one, 1.0)
        assert bank.stats().entries == 1
    with Bank(tmp_path, mode="off") as bank:
        assert bank.exact(request(1)) is None and bank.recall(request(1)) == [] and bank.open(one) is None
        assert bank.write(draft(2)) is None and bank.ls() == [] and bank.explain_empty(request(1)) == "the bank is off"
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "entries").rglob("*")}
    with pytest.raises(ValueError):
        Bank(tmp_path, mode="sometimes")


def test_reading_a_bank_that_is_not_there_creates_nothing(tmp_path):
    with Bank(tmp_path / "none") as bank:
        assert bank.exact(request(1)) is None and bank.recall(request(1)) == [] and bank.ls() == []
        assert bank.explain_empty(request(1)) == "the bank is empty"
        assert not (tmp_path / "none").exists() and not bank.warnings
        assert bank.write(draft(1)) and bank.recall(request(1))
        assert (tmp_path / "none" / "index.sqlite").is_file()


@pytest.mark.parametrize("bad", ["", "../../etc", "A" * 32, "0" * 31, "0" * 32 + "\n", "/" * 32])
def test_an_id_is_never_a_path(bank, bad):
    bank.write(draft(1))
    assert bank.open(bad) is None and bank.result(bad) is None and not bank.remove(bad)
    assert "no entry id" in bank.warnings[-1]


# --- recall ---


def test_recall_is_nearest_first(bank):
    base, other = rows(0), rows(99)
    for step in (3, 0, 4, 1, 2):
        bank.write(draft(step, request=request(step, text=base + 0.2 * step * other)))
    found = bank.recall(request(50, text=base), k=4)
    assert [info.seed for info in found] == [0, 1, 2, 3]
    likeness = [info.similarity for info in found]
    assert likeness == sorted(likeness, reverse=True) and likeness[0] > 0.999
    assert len(bank.recall(request(50, text=base), k=99)) == 5 and bank.recall(request(50), k=0) == []


def test_equal_texts_with_the_same_noise_lead(bank):
    text = rows(0)
    for seed in range(6):
        bank.write(draft(seed, request=request(seed, text=text)))
    assert all(bank.recall(request(seed, text=text), k=1)[0].seed == seed for seed in range(6))


def test_the_same_noise_is_found_behind_any_number_of_nearer_texts(bank):
    base, other = rows(0), rows(99)
    far = bank.write(draft(50, request=request(50, text=base + other)))
    for seed in range(12):
        bank.write(draft(seed, request=request(seed, text=base)))
    wanted = request(50, text=base)
    assert far not in {info.id for info in bank.recall(wanted, k=10)}
    assert [info.id for info in bank.recall(wanted, k=10, only_same_noise=True)] == [far]
    later = replace(wanted.profile, noise="noise-50+another latent")  # a second part of a run in two parts
    assert [i.id for i in bank.recall(replace(wanted, profile=later), only_same_noise=True)] == [far]
    assert bank.recall(request(51, text=base), only_same_noise=True) == []


def test_another_identity_is_never_offered(bank):
    text = rows(0)
    bank.write(draft(1, request=request(1, weights="a", text=text)))
    bank.write(draft(2, request=request(2, weights="b", text=text)))
    bank.write(draft(3, request=request(3, weights="a", shape=(1, 4, 2, 6, 8), text=text)))
    assert [info.seed for info in bank.recall(request(9, weights="a", text=text))] == [1]
    assert [info.seed for info in bank.recall(request(9, weights="b", text=text))] == [2]
    assert bank.recall(request(9, weights="c", text=text)) == []
    assert "weights" in bank.explain_empty(request(9, weights="c")) and bank.explain_empty(request(9, "a")) == ""


def test_another_bank_sees_writes_and_removals(bank):
    with Bank(bank.root) as other:
        assert other.recall(request(1)) == []
        one = bank.write(draft(1))
        assert [info.id for info in other.recall(request(1))] == [one]
        two = bank.write(draft(2))
        assert {info.id for info in other.recall(request(1))} == {one, two}
        bank.remove(one)
        assert [info.id for info in other.recall(request(1))] == [two] and other.open(one) is None


def test_recall_counts_uses(bank):
    one = bank.write(draft(1))
    bank.touch(one, 12.5)
    bank.touch(one, float("nan"))
    info = bank.recall(request(1))[0]
    assert info.uses == 2 and info.saved_seconds == 12.5 and info.last_used >= info.created
    assert bank.stats().uses == 2 and bank.stats().saved_seconds == 12.5


# --- eviction ---


def _row(one: str, seconds: float, uses: int = 0, size: int = 100, last_used: float = 0.0) -> Row:
    return Row(one, "", "", "", size, 0.0, last_used, uses, 0.0, seconds, 1, b"", "")


def test_value_of_an_entry():
    base = value(_row("a", 10), 0)
    assert value(_row("a", 20), 0) == 2 * base and value(_row("a", 10, uses=2), 0) == pytest.approx(3 * base)
    assert value(_row("a", 10, size=200), 0) == base / 2
    assert value(_row("a", 10), HALF_LIFE_SECONDS) == base / 2
    assert value(_row("a", 10, last_used=5.0), 0) == base  # a clock that went back


def test_victims_are_the_least_valuable():
    found = [_row("a", 30), _row("b", 10), _row("c", 20), _row("d", 0, last_used=1), _row("e", 0)]
    assert victims(found, 250, 2) == ["e", "d", "b"]
    assert victims(found, 250, 2, keep="e") == ["d", "b", "c"]
    assert victims(found, 0, 2) == []


BIG = (1, 4, 4, 64, 64)


def _big(seed: int, seconds: float = 60.0):
    return draft(seed, request=request(seed, shape=BIG), provenance={**COMPUTED, "dense_seconds": seconds})


def test_budget_and_order_of_eviction(tmp_path):
    with Bank(tmp_path / "probe") as probe:
        size = probe.open(probe.write(_big(0))).info.bytes
    root, budget = tmp_path / "bank", int(3.6 * size)
    with Bank(root, budget_bytes=budget) as bank:
        ids = {seed: bank.write(_big(seed, seconds)) for seed, seconds in ((1, 50), (2, 10), (3, 30))}
        bank.touch(ids[2], 5.0)
        bank.touch(ids[2], 5.0)
        bank.touch(ids[2], 5.0)  # 10 s four times is worth more than 30 s once
        ids[4] = bank.write(_big(4, 60))
        assert used_bytes(root) <= budget
        assert {info.id for info in bank.ls()} == {ids[1], ids[2], ids[4]}
        ids[5] = bank.write(_big(5, 1))
        assert {info.id for info in bank.ls()} == {ids[1], ids[4], ids[5]}
        ids[6] = bank.write(_big(6, 90))
        assert {info.id for info in bank.ls()} == {ids[1], ids[4], ids[6]} and used_bytes(root) <= budget
        index_equals_folder(bank)
        assert not bank.warnings


def test_quarantine_goes_before_anything_good(tmp_path):
    with Bank(tmp_path / "probe") as probe:
        size = probe.open(probe.write(_big(0))).info.bytes
    with Bank(tmp_path / "bank", budget_bytes=int(2.6 * size)) as bank:
        bad, good = bank.write(_big(1, 99)), bank.write(_big(2))
        path = bank.root / "entries" / bad / "result.safetensors"
        path.write_bytes(path.read_bytes()[:-5])
        assert bank.open(bad) is None and bank.stats().quarantined == 1
        third = bank.write(_big(3))
        assert {info.id for info in bank.ls()} == {good, third} and bank.stats().quarantined == 0


def test_an_entry_larger_than_the_budget_is_refused(tmp_path):
    with Bank(tmp_path, budget_bytes=200_000) as bank:
        small = bank.write(draft(1))
        assert bank.write(_big(2)) is None and "raise the budget" in bank.warnings[-1]
        assert [info.id for info in bank.ls()] == [small]


def test_gc_follows_a_smaller_budget(tmp_path):
    with Bank(tmp_path) as bank:
        for seed in range(4):
            bank.write(_big(seed, 10.0 + seed))
        size = bank.ls()[0].bytes
    with Bank(tmp_path, budget_bytes=int(2.6 * size)) as bank:
        assert bank.gc() == {"swept": 0, "evicted": 2, "entries": 2}
        assert {info.seed for info in bank.ls()} == {2, 3} and used_bytes(tmp_path) <= bank.budget_bytes


# --- whole ---


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.sampled_from(["write", "write", "remove", "touch", "gc", "reopen", "lose"]), st.integers(0, 4)),
        min_size=1,
        max_size=14,
    )
)
def test_index_equals_folder_after_any_sequence(tmp_path_factory, steps):
    root = tmp_path_factory.mktemp("bank")
    bank, expected = Bank(root), set()
    for action, seed in steps:
        one = entry_id(request(seed))
        if action == "write":
            assert bank.write(draft(seed)) == one
            expected.add(one)
        elif action == "remove":
            assert bank.remove(one) == (one in expected)
            expected.discard(one)
        elif action == "touch":
            bank.touch(one, 1.0)
        elif action == "gc":
            bank.gc()
        else:
            bank.close()
            if action == "lose":
                (root / "index.sqlite").unlink(missing_ok=True)
            bank = Bank(root)
        assert {info.id for info in bank.ls()} == expected
        index_equals_folder(bank)
    assert not [p for p in root.iterdir() if p.name.startswith(".")]
    bank.close()


def test_import_and_construction_open_nothing(tmp_path):
    code = "import sqlite3; sqlite3.connect = None; from carnator_core.bank import Bank; Bank('made')"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert run.returncode == 0 and not list(tmp_path.iterdir())


def test_bench_runs():
    from carnator_core.bank.bench import measure

    start, result = time.monotonic(), measure(200, repeats=5)
    assert result["entries"] == 200 and 0 < result["median_ms"] and time.monotonic() - start < 30
    json.dumps(result)
