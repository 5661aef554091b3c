"""The index: one SQLite table that can always be made again from the entries. Raises sqlite3.Error throughout."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np

from ..request import begun_with

INDEX_SCHEMA = 1
BUSY_SECONDS = 1.0  # how long a call waits for another process's lock
MEMORY = ":memory:"
_CREATE = (
    """CREATE TABLE entries (
        id TEXT PRIMARY KEY, identity TEXT NOT NULL, profile TEXT NOT NULL, noise TEXT NOT NULL,
        bytes INTEGER NOT NULL, created REAL NOT NULL, last_used REAL NOT NULL, uses INTEGER NOT NULL,
        saved_seconds REAL NOT NULL, dense_seconds REAL NOT NULL, schema INTEGER NOT NULL,
        vector BLOB NOT NULL, card TEXT NOT NULL)""",
    "CREATE INDEX by_identity ON entries (identity)",
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL)",
    "INSERT INTO meta VALUES ('generation', 0)",
    """CREATE TRIGGER added AFTER INSERT ON entries
        BEGIN UPDATE meta SET value = value + 1 WHERE key = 'generation'; END""",
    """CREATE TRIGGER gone AFTER DELETE ON entries
        BEGIN UPDATE meta SET value = value + 1 WHERE key = 'generation'; END""",
    f"PRAGMA user_version = {INDEX_SCHEMA}",
)


@dataclass(frozen=True)
class Row:
    """One entry in the index. `vector` is float16 bytes; `card` the JSON that an EntryInfo is made from."""

    id: str
    identity: str
    profile: str
    noise: str
    bytes: int
    created: float
    last_used: float
    uses: int
    saved_seconds: float
    dense_seconds: float
    schema: int
    vector: bytes
    card: str


_COLUMNS = ", ".join(f.name for f in fields(Row))
_LIGHT = _COLUMNS.replace("vector", "x''")


class Unusable(sqlite3.DatabaseError):
    """The file is of another schema, or holds what this one cannot mean."""


def is_damage(error: sqlite3.Error) -> bool:
    """Whether making the index anew cures an error; a lock, a full disk or missing rights it does not."""
    if isinstance(error, sqlite3.OperationalError):
        return str(error).startswith(("no such", "table ", "malformed database schema"))
    return isinstance(error, sqlite3.DatabaseError)


class Index:
    """A connection to the index, for one thread at a time."""

    def __init__(self, path: Path | str):
        """Open, and create when empty. Raises Unusable for another schema."""
        self._db = sqlite3.connect(str(path), timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(str(path) == MEMORY)
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, memory: bool) -> None:
        if self._version() == 0 and not memory:
            self._db.execute("PRAGMA auto_vacuum = FULL")
        self._patiently("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")  # a lost last commit is found again in the folder
        self._db.execute("PRAGMA wal_autocheckpoint = 64")
        if self._version() == 0:
            with self._transaction():
                if self._version() == 0:  # not yet made by another process
                    for statement in _CREATE:
                        self._db.execute(statement)
        if self._version() != INDEX_SCHEMA:
            raise Unusable(f"index schema {self._version()} is not {INDEX_SCHEMA}")

    def _version(self) -> int:
        return self._db.execute("PRAGMA user_version").fetchone()[0]

    def _patiently(self, statement: str) -> None:
        """SQLite does not wait for a lock when it changes the journal's mode; this does."""
        until = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self._db.execute(statement).fetchall()
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > until:
                    raise
            time.sleep(0.02)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def generation(self) -> int:
        """Moves whenever any process adds or removes a row."""
        row = self._db.execute("SELECT value FROM meta WHERE key = 'generation'").fetchone()
        if row is None:
            raise Unusable("the index has lost its generation")
        return row[0]

    def ids(self) -> set[str]:
        return {row[0] for row in self._db.execute("SELECT id FROM entries")}

    def rows(self, ids: Iterable[str] | None = None, vectors: bool = False) -> list[Row]:
        """All rows, or those of some ids in their order; `vector` is empty unless asked for."""
        select = f"SELECT {_COLUMNS if vectors else _LIGHT} FROM entries"
        if ids is None:
            return [Row(*row) for row in self._db.execute(select)]
        found = (self._db.execute(f"{select} WHERE id = ?", (one,)).fetchone() for one in ids)
        return [Row(*row) for row in found if row]

    def put(self, rows: Iterable[Row]) -> None:
        """Add rows; one that is there stays as it is."""
        marks = ", ".join("?" * len(fields(Row)))
        with self._transaction():
            self._db.executemany(
                f"INSERT INTO entries ({_COLUMNS}) VALUES ({marks}) ON CONFLICT (id) DO NOTHING",
                (astuple(row) for row in rows),
            )

    def forget(self, ids: Iterable[str], unless: Callable[[str], bool]) -> None:
        """Remove rows, except where `unless` holds now: another process may just have written that entry again."""
        with self._transaction():
            self._db.executemany("DELETE FROM entries WHERE id = ?", [(one,) for one in ids if not unless(one)])

    def touch(self, entry_id: str, saved_seconds: float, now: float) -> bool:
        """Count one use; whether the entry is known."""
        done = self._db.execute(
            "UPDATE entries SET uses = uses + 1, last_used = max(last_used, ?), saved_seconds = saved_seconds + ?"
            " WHERE id = ?",
            (now, saved_seconds, entry_id),
        )
        return done.rowcount > 0

    def restore(self, rows: Iterable[Row]) -> None:
        """Give rows back the use that was counted before a rebuild."""
        with self._transaction():
            self._db.executemany(
                "UPDATE entries SET uses = ?, last_used = ?, saved_seconds = ? WHERE id = ?",
                [(row.uses, row.last_used, row.saved_seconds, row.id) for row in rows],
            )

    def clear(self) -> None:
        self._db.execute("DELETE FROM entries")

    def total_bytes(self) -> int:
        return self._db.execute("SELECT coalesce(sum(bytes), 0) FROM entries").fetchone()[0]

    def shrink(self) -> None:
        """Fold the write-ahead log into the file; without effect while another process reads."""
        with contextlib.suppress(sqlite3.OperationalError):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def vectors(self, identity: str, dimensions: int) -> tuple[list[str], np.ndarray, np.ndarray]:
        """(ids, noises begun with, float32 vectors (dimensions, N)) of one identity; damaged vectors are left out.

        Vectors are columns: one pass over all of them is then a sum of long rows, half again as fast.
        """
        query = "SELECT id, noise, vector FROM entries WHERE identity = ? AND length(vector) = ?"
        rows = self._db.execute(query, (identity, 2 * dimensions)).fetchall()
        flat = np.frombuffer(b"".join(row[2] for row in rows), dtype=np.float16)
        matrix = np.ascontiguousarray(flat.reshape(len(rows), dimensions).T.astype(np.float32))
        sound = np.isfinite(matrix).all(0)
        ids = [row[0] for row, good in zip(rows, sound, strict=True) if good]
        noise = np.array([begun_with(row[1]) for row in rows], dtype=str)
        return (ids, noise, matrix) if sound.all() else (ids, noise[sound], np.ascontiguousarray(matrix[:, sound]))


def read_only_rows(path: Path, immutable: bool) -> list[Row]:
    """All rows of an index that cannot be opened for writing."""
    mode = "immutable=1" if immutable else "mode=ro"
    db = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        if db.execute("PRAGMA user_version").fetchone()[0] != INDEX_SCHEMA:
            return []
        return [Row(*row) for row in db.execute(f"SELECT {_COLUMNS} FROM entries")]
    finally:
        db.close()
