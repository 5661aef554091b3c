"""The index in service: opened lazily, repaired, replaced by one in memory where the file cannot be used.

Nothing here raises for a locked, read-only, damaged or missing index: the entries' folder is the truth, and the
catalogue brings whatever index it has in line with it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from .files import Folder
from .index import MEMORY, Index, Row, is_damage, read_only_rows

RETRY_SECONDS = 30.0  # before an index that could not be used is tried again
CACHE_BYTES = 128 * 2**20  # of text vectors in memory
DECIMALS = 5  # of a similarity; finer differences are noise of float16 vectors
T = TypeVar("T")


@dataclass(frozen=True)
class _Vectors:
    generation: int
    ids: list[str]
    noise: np.ndarray  # what each run began with
    matrix: np.ndarray


class Catalogue:
    """Rows of all entries in a folder.

    `read_row` makes a row from an entry on disk, or returns None for one that is gone or bad. `warn` takes a sentence.
    """

    def __init__(
        self, folder: Folder, writable: bool, read_row: Callable[[str], Row | None], warn: Callable[[str], None]
    ):
        self._folder, self._writable, self._read_row, self._warn = folder, writable, read_row, warn
        self._lock = threading.RLock()
        self._index: Index | None = None
        self._on_disk = False
        self._inode: tuple[int, int] | None = None
        self._pid = 0
        self._retry_at = 0.0
        self._seen = -1  # Folder.changed() at the last sync
        self._cache: OrderedDict[tuple[str, int], _Vectors] = OrderedDict()
        self._inherited: list[Index] = []  # connections of a parent process: never used, never closed

    # --- opening ---

    def _file_id(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._folder.index)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _current(self) -> Index:
        """The index to use now, in line with the folder."""
        if self._index is not None and self._pid != os.getpid():
            self._inherited.append(self._index)
            self._index = None
        if self._index is None:
            return self._open()
        if self._on_disk:
            return self._index if self._file_id() == self._inode else self._open()
        if self._may_use_disk() and time.monotonic() >= self._retry_at:
            return self._open()
        if self._folder.changed() != self._seen:
            self._sync(self._index)
        return self._index

    def _may_use_disk(self) -> bool:
        """A bank that was never written to gets no files from being read."""
        return self._writable and self._folder.entries.is_dir()

    def _open(self) -> Index:
        self.close()
        self._pid = os.getpid()
        if self._may_use_disk():
            try:
                self._use_disk()
                return self._index
            except (sqlite3.Error, OSError) as error:
                self._warn(f"the index {self._folder.index} cannot be used, one in memory replaces it: {error}")
        self._retry_at = time.monotonic() + RETRY_SECONDS if self._may_use_disk() else 0.0
        self._use(self._copy_in_memory(), on_disk=False)
        return self._index

    def _use(self, index: Index, on_disk: bool) -> None:
        self.close()
        self._index, self._on_disk, self._inode = index, on_disk, self._file_id()
        self._sync(index)

    def _use_disk(self) -> None:
        """The index file, made anew when damaged or of another schema."""
        try:
            self._use(Index(self._folder.index), on_disk=True)
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            self.close()
            self._remove_file(error)
            self._use(Index(self._folder.index), on_disk=True)

    def _remove_file(self, error: Exception) -> None:
        self._warn(f"the index {self._folder.index} is unusable and is made anew from the entries: {error}")
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._folder.index}{suffix}")

    def _copy_in_memory(self) -> Index:
        index = Index(MEMORY)
        if self._folder.index.is_file():
            for immutable in (False, True):
                try:
                    index.put(read_only_rows(self._folder.index, immutable))
                    break
                except sqlite3.Error as error:
                    if "locked" in str(error):  # reading past a lock could read halves; the folder is asked instead
                        break
        return index

    def close(self) -> None:
        with self._lock:
            if self._index is not None and self._pid == os.getpid():
                self._index.close()
            self._index = None
            self._cache.clear()

    def _sync(self, index: Index) -> None:
        """Bring the index in line with the folder."""
        self._seen = self._folder.changed()
        known = index.ids()
        present = set(self._folder.ids())  # listed after the rows: what appears in between is only added twice
        if known - present:
            index.forget(known - present, unless=self._folder.has)
        rows = [row for row in map(self._read_row, sorted(present - known)) if row]
        if rows:
            index.put(rows)

    def _run(self, work: Callable[[Index], T]) -> T:
        """Do something with the index; when the file fails, with a new one or with one in memory."""
        with self._lock:
            index = self._current()
            try:
                return work(index)
            except sqlite3.Error as error:
                self._recover(error)
            return work(self._current())

    def _recover(self, error: sqlite3.Error) -> None:
        self.close()
        if self._on_disk and is_damage(error):
            try:
                self._remove_file(error)
                return
            except OSError as stuck:
                error = sqlite3.OperationalError(str(stuck))
        self._warn(f"the index {self._folder.index} cannot be used, one in memory replaces it: {error}")
        self._retry_at = time.monotonic() + RETRY_SECONDS
        self._pid = os.getpid()
        self._use(self._copy_in_memory(), on_disk=False)

    # --- rows ---

    def put(self, row: Row) -> None:
        self._run(lambda index: index.put([row]))

    def forget(self, ids: Iterable[str]) -> None:
        ids = list(ids)
        self._run(lambda index: index.forget(ids, unless=self._folder.has))

    def drop(self, entry_id: str) -> None:
        """Remove a row although its folder stays (it is bad and cannot be moved)."""
        self._run(lambda index: index.forget([entry_id], unless=lambda _: False))

    def row(self, entry_id: str) -> Row | None:
        found = self._run(lambda index: index.rows([entry_id]))
        return found[0] if found else None

    def rows(self, ids: Iterable[str] | None = None) -> list[Row]:
        ids = None if ids is None else list(ids)
        return self._run(lambda index: index.rows(ids))

    def touch(self, entry_id: str, saved_seconds: float, now: float) -> bool:
        return self._run(lambda index: index.touch(entry_id, saved_seconds, now))

    def total_bytes(self) -> int:
        return self._run(lambda index: index.total_bytes())

    def shrink(self) -> None:
        self._run(lambda index: index.shrink())

    def sync(self) -> None:
        self._run(self._sync)

    def rebuild(self) -> int:
        """Forget all rows and read every entry anew; counted uses are kept. Returns how many rows there are."""

        def work(index: Index) -> int:
            before = index.rows()
            index.clear()
            self._sync(index)
            index.restore(before)
            return len(index.ids())

        return self._run(work)

    # --- recall ---

    def nearest(
        self, identity: str, vector: np.ndarray, noise: str, k: int, only_same_noise: bool
    ) -> list[tuple[Row, float]]:
        """(row, cosine) of the k nearest texts of one identity; among equals those with the same noise come first.

        `noise`: the digest that a run began with, as `begun_with` tells it.
        """

        def work(index: Index) -> list[tuple[Row, float]]:
            known = self._vectors(index, identity, len(vector))
            places, scores = _top(known, vector, noise, k, only_same_noise)
            rows = {row.id: row for row in index.rows(known.ids[place] for place in places)}
            pairs = ((rows.get(known.ids[place]), float(scores[place])) for place in places)
            return [(row, score) for row, score in pairs if row]

        return self._run(work)

    def _vectors(self, index: Index, identity: str, dimensions: int) -> _Vectors:
        """Vectors of one identity, from memory while no process added or removed an entry."""
        key, generation = (identity, dimensions), index.generation()
        cached = self._cache.get(key)
        if cached is None or cached.generation != generation:
            cached = _Vectors(generation, *index.vectors(identity, dimensions))
            self._cache[key] = cached
        self._cache.move_to_end(key)
        while len(self._cache) > 1 and sum(c.matrix.nbytes for c in self._cache.values()) > CACHE_BYTES:
            self._cache.popitem(last=False)
        return cached


def _top(
    known: _Vectors, vector: np.ndarray, noise: str, k: int, only_same_noise: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(places of the k best in descending order, similarities of all)."""
    products = torch.from_numpy(vector.astype(np.float32)) @ torch.from_numpy(known.matrix)  # see `text._projection`
    scores, same = np.round(products.numpy(), DECIMALS), known.noise == noise
    rank = scores + same * np.float32(0.4 * 10**-DECIMALS)
    among = np.flatnonzero(same) if only_same_noise else np.arange(len(rank))
    count = min(k, len(among))
    if 0 < count < len(among):
        among = among[np.argpartition(-rank[among], count - 1)[:count]]
    return among[np.argsort(-rank[among], kind="stable")], scores
