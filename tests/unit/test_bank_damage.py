"""What the bank survives: kills, damaged files, locks, rights, full disks, several processes."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import random
import shutil
import signal
import sqlite3
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from carnator_core.bank import Bank, entry_id, store
from carnator_core.bank import index as index_module
from carnator_core.bank.entry import MANIFEST, SCHEMA, _seal_of
from carnator_core.bank.files import _HOST, QUARANTINE_LIMIT
from tests.unit.test_bank_support import draft, fork, index_equals_folder, request, wait

posix = pytest.mark.skipif(os.name != "posix", reason="forks and signals")


@pytest.fixture
def bank(tmp_path):
    with Bank(tmp_path / "bank") as made:
        yield made


def entry_file(bank: Bank, one: str, name: str) -> Path:
    return bank.root / "entries" / one / name


# --- kills ---


@posix
def test_kill_at_50_moments_of_a_write(tmp_path):
    chance, root, done = random.Random(0), tmp_path / "bank", tmp_path / "done"
    started, tell = os.pipe()

    def write_on(start: int) -> None:
        with Bank(root) as bank, open(done, "a") as log:
            for seed in range(start, start + 1000):
                log.write(f"{bank.write(draft(seed))}\n")
                log.flush()
                if seed == start:
                    os.write(tell, b"x")

    for moment in range(50):
        pid = fork(lambda start=1000 * moment: write_on(start))
        assert os.read(started, 1)  # the first entry is in
        time.sleep(chance.uniform(0.0, 0.03))
        os.kill(pid, signal.SIGKILL)
        assert wait(pid) == -signal.SIGKILL
        complete = {line for line in done.read_text().splitlines() if len(line) == 32}
        with Bank(root) as bank:
            present = {info.id for info in bank.ls()}
            assert complete <= present
            assert len(present - complete) <= moment + 1  # renamed into place, killed before it was told
            index_equals_folder(bank)
    with Bank(root) as bank:
        assert len(complete) >= 50 and set(bank.verify().values()) == {None}
        assert bank.stats().quarantined == 0 and "None" not in done.read_text()
        bank.gc()
        assert not list(root.glob(".t*"))


def test_leftovers_are_swept_only_when_abandoned(bank):
    bank.write(draft(1))
    old = time.time() - 4000
    dead = fork(lambda: 0)
    wait(dead)
    names = {
        f".tmp-{dead}-{_HOST}-00": 0,  # its writer is gone
        f".tmp-{dead}-00000000-00": 1,  # another machine's
        f".tmp-{os.getpid()}-{_HOST}-00": 1,  # being written
        f".tmp-{os.getpid()}-{_HOST}-01": 0,  # old
        ".trash-1-00": 0,
        ".tmp-mine": 1,  # not ours
    }
    for name in names:
        (bank.root / name / "sub").mkdir(parents=True)
    os.utime(bank.root / f".tmp-{os.getpid()}-{_HOST}-01", (old, old))
    assert bank.gc()["swept"] == 3
    assert {name: int((bank.root / name).exists()) for name in names} == names


# --- damaged files ---


def test_truncation_at_50_places(bank):
    chance, keep = random.Random(1), [bank.write(draft(seed)) for seed in (100, 101)]
    for _ in range(50):
        one = bank.write(draft(1))
        path = chance.choice(sorted((bank.root / "entries" / one).iterdir()))
        with open(path, "r+b") as file:
            file.truncate(chance.randrange(path.stat().st_size))
        before = bank.stats().quarantined
        assert bank.exact(request(1)) is None and bank.open(one) is None
        assert bank.stats().quarantined == min(before + 1, QUARANTINE_LIMIT)
        assert [info.id for info in bank.recall(request(1)) if info.id == one] == []
    assert bank.verify() == dict.fromkeys(sorted(keep))
    index_equals_folder(bank)


@pytest.mark.parametrize("name", [MANIFEST, "signature.safetensors", "predictions.safetensors", "result.safetensors"])
@pytest.mark.parametrize("harm", ["trailing", "empty", "missing", "flip", "folder"])
def test_harm_to_one_file(bank, name, harm):
    one, good = bank.write(draft(1)), bank.write(draft(2))
    path = entry_file(bank, one, name)
    data = path.read_bytes()
    path.unlink()
    if harm == "folder":
        path.mkdir()
    elif harm != "missing":
        flipped = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        path.write_bytes({"trailing": data + b"\0" * 8, "empty": b"", "flip": flipped}[harm])
    reasons = bank.verify()
    assert reasons[one] and reasons[good] is None
    assert bank.result(one) is None and bank.open(one) is None
    assert bank.stats().quarantined == 1 and bank.write(draft(1)) == one and bank.result(one) is not None


@pytest.mark.parametrize("part", ["predictions", "result"])
def test_a_flip_is_found_when_the_part_is_read(bank, part):
    one, good = bank.write(draft(1)), bank.write(draft(2))
    entry = bank.open(one)
    path = entry_file(bank, one, f"{part}.safetensors")
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(bytes(data))
    assert getattr(entry, part)() is None
    assert bank.exact(request(1)) is None and bank.stats().quarantined == 1 and bank.result(good) is not None


def _rewrite(bank: Bank, one: str, change) -> None:
    path = entry_file(bank, one, MANIFEST)
    manifest = json.loads(path.read_bytes())
    change(manifest)
    manifest["checksum"] = _seal_of(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(schema=1),
        lambda m: m.update(schema="2"),
        lambda m: m.update(id="0" * 32),
        lambda m: m["identity"].update(weights="other"),
        lambda m: m["identity"].update(parametrisation="unheard of"),
        lambda m: m["identity"].pop("weights"),
        lambda m: m["profile"].update(digest="other"),
        lambda m: m["profile"].pop("noise"),
        lambda m: m["provenance"].update(computed=False),
        lambda m: m.update(files={}),
        lambda m: m["files"].update({"../../secret": m["files"]["result.safetensors"]}),
        lambda m: m["files"]["result.safetensors"].update(bytes=1),
        lambda m: m["files"]["result.safetensors"]["tensors"]["result"].reverse(),
        lambda m: m["files"]["predictions.safetensors"]["tensors"]["first"][1].append(2),
        lambda m: m["files"]["signature.safetensors"]["tensors"].pop("bank.text"),
        lambda m: m.update(files=[1]),
        lambda m: m.update(prediction_sigmas=[0.1, 0.2, 0.3, 0.4]),
        lambda m: m.update(prediction_sigmas=None),
        lambda m: m.pop("created"),
    ],
)
def test_a_manifest_that_lies_is_quarantined(bank, change):
    one, good = bank.write(draft(1)), bank.write(draft(2))
    _rewrite(bank, one, change)
    assert bank.exact(request(1)) is None and bank.open(one) is None
    assert bank.stats().quarantined == 1 and [info.id for info in bank.ls()] == [good]


def test_tensors_that_differ_from_the_manifest(bank):
    one = bank.write(draft(1))
    _rewrite(bank, one, lambda m: m["files"]["signature.safetensors"]["tensors"].update(states=["float32", [8, 3]]))
    assert bank.open(one) is None and "other tensors" in bank.warnings[-1]


def test_non_finite_values_on_disk(bank, monkeypatch):
    monkeypatch.setattr(store.codec, "check_draft", lambda made: None)
    made = draft(1)
    made.result[0] = float("nan")
    entry = bank.open(bank.write(made))
    assert entry.result() is None
    assert "non-finite" in bank.warnings[-1] and bank.stats().quarantined == 1


def test_a_newer_schema_comes_back_with_its_version(bank, monkeypatch):
    one = bank.write(draft(1))
    _rewrite(bank, one, lambda m: m.update(schema=SCHEMA + 1))
    assert bank.open(one) is None and bank.stats().quarantined == 1
    assert "another version" in bank.warnings[-1]
    monkeypatch.setattr(store.codec, "SCHEMA", SCHEMA + 1)
    assert bank.rebuild() == 1 and bank.open(one) is not None and bank.stats().quarantined == 0


def test_quarantine_is_bounded(bank):
    for seed in range(QUARANTINE_LIMIT + 5):
        one = bank.write(draft(seed))
        entry_file(bank, one, "result.safetensors").unlink()
        assert bank.open(one) is None
    assert bank.stats().quarantined == QUARANTINE_LIMIT
    kept = {p.name[:32] for p in (bank.root / "quarantine").iterdir()}
    assert entry_id(request(0)) not in kept and one in kept


class Bomb:
    def __reduce__(self):
        return os.abort, ()


def test_a_pickle_is_never_read(bank):
    one = bank.write(draft(1))
    harm = pickle.dumps(Bomb())
    for place in ("entries", f"entries/{one}"):
        for name in ("evil.pkl", "evil.pt", "result.safetensors.pt"):
            (bank.root / place / name).write_bytes(harm)
    assert bank.rebuild() == 1 and bank.verify() == {one: None} and bank.open(one).predictions() is not None
    entry_file(bank, one, "result.safetensors").write_bytes(harm)
    assert bank.result(one) is None


def test_foreign_names_and_links_are_left_alone(bank, tmp_path):
    one = bank.write(draft(1))
    (bank.root / "entries" / "notes").mkdir()
    outside = tmp_path / "outside"
    shutil.copytree(bank.root / "entries" / one, outside)
    (bank.root / "entries" / ("a" * 32)).symlink_to(outside)
    assert bank.rebuild() == 1 and bank.open("a" * 32) is None and set(bank.verify()) == {one}
    bank.remove("a" * 32)
    assert (outside / MANIFEST).is_file() and (bank.root / "entries" / "notes").is_dir()


# --- the index ---


@pytest.mark.parametrize("harm", ["missing", "empty", "garbage", "head", "middle", "schema", "table", "row"])
def test_a_damaged_index_is_made_anew(tmp_path, harm):
    with Bank(tmp_path) as bank:
        ids = {bank.write(draft(seed)) for seed in range(12)}
    path = tmp_path / "index.sqlite"
    data = bytearray(path.read_bytes())
    if harm == "missing":
        path.unlink()
    elif harm in ("empty", "garbage"):
        path.write_bytes(b"" if harm == "empty" else b"no database" * 1000)
    elif harm in ("head", "middle"):
        start = 0 if harm == "head" else 4096
        data[start : len(data)] = b"\xff" * (len(data) - start)
        path.write_bytes(bytes(data))
    else:
        with sqlite3.connect(path) as db:
            db.execute(
                {"schema": "PRAGMA user_version = 99", "table": "DROP TABLE meta", "row": "DELETE FROM entries"}[harm]
            )
        db.close()
    with Bank(tmp_path) as bank:
        assert {info.id for info in bank.recall(request(3), k=50)} == ids
        assert bank.recall(request(3))[0].id == entry_id(request(3))
        assert bank.write(draft(50)) and {info.id for info in bank.ls()} == {*ids, entry_id(request(50))}
        index_equals_folder(bank)
    with Bank(tmp_path) as bank:
        assert len(bank.ls()) == 13 and not bank.warnings


def test_the_index_vanishes_while_it_is_open(bank):
    one = bank.write(draft(1))
    for name in bank.root.glob("index.sqlite*"):
        name.unlink()
    assert [info.id for info in bank.recall(request(1))] == [one]
    two = bank.write(draft(2))
    with Bank(bank.root) as other:
        assert {info.id for info in other.ls()} == {one, two}


def test_rows_without_entry_and_entries_without_row(bank):
    one, two, three = (bank.write(draft(seed)) for seed in (1, 2, 3))
    bank.close()
    shutil.rmtree(bank.root / "entries" / one)
    with sqlite3.connect(bank.root / "index.sqlite") as db:
        db.execute("DELETE FROM entries WHERE id = ?", (two,))
    db.close()
    assert {info.id for info in bank.recall(request(1))} == {two, three}


def test_rebuild_keeps_uses(bank):
    one = bank.write(draft(1))
    bank.touch(one, 3.0)
    assert bank.rebuild() == 1 and bank.ls()[0].uses == 1 and bank.ls()[0].saved_seconds == 3.0


def test_damaged_cards_and_vectors(bank):
    one, two = bank.write(draft(1)), bank.write(draft(2))
    bank.close()
    with sqlite3.connect(bank.root / "index.sqlite") as db:
        db.execute("UPDATE entries SET card = '{' WHERE id = ?", (one,))
        db.execute("UPDATE entries SET vector = ? WHERE id = ?", (b"\x00\x7e" * 32, two))
    db.close()
    assert [info.prompt for info in bank.recall(request(1))] == ["prompt 1"]
    assert len(bank.ls()) == 2 and not bank.warnings


@posix
@pytest.mark.parametrize("lock", ["BEGIN EXCLUSIVE", "PRAGMA locking_mode = EXCLUSIVE; BEGIN IMMEDIATE"])
@pytest.mark.parametrize("opened", [False, True])
def test_an_exclusive_lock_of_another_process(tmp_path, monkeypatch, caplog, lock, opened):
    monkeypatch.setattr(index_module, "BUSY_SECONDS", 0.1)
    bank = Bank(tmp_path)
    one = bank.write(draft(1))
    if not opened:
        bank.close()
    ready, hold = os.pipe()

    def locker() -> None:
        db = sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)
        for statement in lock.split("; "):
            db.execute(statement)
        db.execute("UPDATE meta SET value = value")
        os.write(hold, b"x")
        time.sleep(60)

    bank_was_open = opened and "locking" in lock
    if bank_was_open:
        bank.close()  # this kind of lock is only to be had when nobody has the file open
    pid = fork(locker)
    try:
        assert os.read(ready, 1) == b"x"
        with caplog.at_level(logging.WARNING, logger="carnator"):
            assert bank.exact(request(1)).id == one and [info.id for info in bank.recall(request(1))] == [one]
            bank.touch(one, 1.0)
            two = bank.write(draft(2))
            assert two and {info.id for info in bank.recall(request(1))} == {one, two} and bank.result(two) is not None
        assert len(caplog.records) == 1
    finally:
        os.kill(pid, signal.SIGKILL)
        wait(pid)
    bank._catalogue._retry_at = 0.0
    assert {info.id for info in bank.recall(request(1))} == {one, two}
    assert bank._catalogue._on_disk
    bank.close()
    with Bank(tmp_path) as other:
        assert {info.id for info in other.ls()} == {one, two}


# --- rights and space ---


@posix
@pytest.mark.parametrize("mode", ["on", "read-only"])
@pytest.mark.parametrize("with_index", [True, False])
def test_a_read_only_folder(mode, with_index):
    root = Path(tempfile.mkdtemp(prefix="bank-"))
    try:
        with Bank(root) as bank:
            one = bank.write(draft(1))
            bad = bank.write(draft(2))
            entry_file(bank, bad, "result.safetensors").write_bytes(b"")
        if not with_index:
            (root / "index.sqlite").unlink()
        for path in (root, *root.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)

        def visit() -> None:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            bank = Bank(root, mode=mode)
            assert bank.exact(request(1)).id == one and torch.equal(bank.result(one), draft(1).result)
            assert bank.open(bad) is None and bank.exact(request(2)) is None
            assert [info.id for info in bank.recall(request(1))] == [one]
            assert bank.write(draft(3)) is None and not bank.remove(one)
            bank.touch(one, 1.0)
            bank.gc()
            bank.rebuild()
            assert bank.write(draft(4)) is None
            assert bank.open(one).predictions() is not None and bank.stats().entries == 1

        assert wait(fork(visit)) == 0
    finally:
        for path in (root, *root.rglob("*")):
            path.chmod(0o755)
        shutil.rmtree(root)


def test_a_root_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        bank = Bank(root)
        assert bank.write(draft(1)) is None and bank.recall(request(1)) == [] and bank.exact(request(1)) is None
        assert bank.ls() == [] and bank.stats().entries == 0 and "choose another" in " ".join(bank.warnings)


def test_a_full_disk(bank, monkeypatch, caplog):
    one = bank.write(draft(1))
    real, left = store.write_bytes, [2]

    def full(path, data):
        left[0] -= 1
        if left[0] < 0:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(store, "write_bytes", full)
    with caplog.at_level(logging.WARNING, logger="carnator"):
        assert bank.write(draft(2)) is None and bank.write(draft(3)) is None
    assert len(caplog.records) == 1 and "free space" in bank.warnings[-1]
    assert not list(bank.root.glob(".t*")) and [info.id for info in bank.ls()] == [one]
    monkeypatch.setattr(store, "write_bytes", real)
    assert bank.write(draft(2))


@posix
def test_a_file_size_limit(tmp_path):
    """Every write fails, those of the index too."""

    resource = pytest.importorskip("resource")

    def limited() -> None:
        bank = Bank(tmp_path)
        one = bank.write(draft(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        assert bank.write(draft(2)) is None
        bank.touch(one, 1.0)
        assert bank.exact(request(1)).id == one and [info.id for info in bank.recall(request(1))] == [one]

    assert wait(fork(limited)) == 0
    with Bank(tmp_path) as bank:
        assert [info.id for info in bank.ls()] == [entry_id(request(1))] and set(bank.verify().values()) == {None}


def test_the_last_of_the_disk_is_the_hosts(bank, monkeypatch):
    usage = shutil.disk_usage(bank.root.parent)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    assert bank.write(draft(1)) is None and "stay reserved" in bank.warnings[-1]


# --- several at once ---


@posix
def test_two_processes_write_the_same_and_different_entries(tmp_path):
    def writer(mine: int) -> None:
        with Bank(tmp_path) as bank:
            for number in range(50):
                assert bank.write(draft(number)) == entry_id(request(number)), bank.warnings
                assert bank.write(draft(mine + number)), bank.warnings
                assert bank.recall(request(number), k=3)
            assert not bank.warnings, bank.warnings

    assert [wait(pid) for pid in [fork(lambda: writer(1000)), fork(lambda: writer(2000))]] == [0, 0]
    with Bank(tmp_path) as bank:
        assert len(bank.ls()) == 150 and set(bank.verify().values()) == {None}
        index_equals_folder(bank)
        assert not list(tmp_path.glob(".t*"))


@posix
def test_reading_while_another_process_deletes(tmp_path):
    with Bank(tmp_path) as bank:
        bank.write(draft(0))

    def churn() -> None:
        with Bank(tmp_path) as bank:
            for _ in range(60):
                assert bank.remove(entry_id(request(0)))
                assert bank.write(draft(0))

    pid, read, result = fork(churn), 0, draft(0).result
    with Bank(tmp_path) as bank:
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            entry = bank.open(entry_id(request(0)))
            part = entry.result() if entry else None
            read += part is not None
            assert part is None or torch.equal(part, result)
        assert wait(pid) == 0 and read > 0 and bank.stats().quarantined == 0 and not bank.warnings


def test_two_processes_delete_the_same_entry(bank):
    one = bank.write(draft(1))
    with Bank(bank.root) as other:
        assert other.recall(request(1)) and bank.remove(one) and not other.remove(one)
        assert other.recall(request(1)) == [] and not other.warnings


def test_threads_share_a_bank(bank):
    failures: list[BaseException] = []

    def work(start: int) -> None:
        try:
            for seed in range(start, start + 8):
                one = bank.write(draft(seed))
                assert bank.recall(request(seed), k=1)[0].id == one and bank.result(one) is not None
                bank.touch(one, 1.0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 4, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and not bank.warnings
    index_equals_folder(bank)


@posix
def test_a_forked_child_opens_its_own_index(bank):
    bank.write(draft(1))
    assert wait(fork(lambda: 0 if bank.write(draft(2)) and len(bank.ls()) == 2 else 1)) == 0
    assert len(bank.ls()) == 2 and bank.write(draft(3)) and not bank.warnings
