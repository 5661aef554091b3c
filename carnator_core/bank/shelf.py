"""The entries on disk, read one at a time and checked. A bad one is set aside, and the index is told to forget it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from . import entry as codec
from .entry import BadEntry
from .files import Folder, Stamp
from .index import Row

FAILURES = (OSError, sqlite3.Error, ValueError, RuntimeError, MemoryError, SafetensorError)
GONE = "gone"
T = TypeVar("T")
Manifest = dict[str, Any]


class Shelf:
    """Reads entries of a folder. Nothing here raises for what is wrong with an entry.

    `movable`: whether a bad entry may be moved to quarantine; otherwise, or where moving fails, it is remembered as
    bad and no longer read. `warn(kind, text)` hears of it. `forget(id, moved)` is asked to take a bad entry out of the
    index; it is never called from `row`, which the index itself calls.
    """

    def __init__(
        self,
        folder: Folder,
        movable: bool,
        warn: Callable[[str, str], None],
        forget: Callable[[str, bool], None],
    ):
        self._folder, self._movable, self._warn, self._forget = folder, movable, warn, forget
        self._bad: set[str] = set()  # bad entries that could not be moved away

    def manifest(self, entry_id: str) -> Manifest | None:
        """A checked manifest; None when the entry is gone or bad."""
        folder, stamp = self._folder.entry(entry_id), self._folder.stamp(entry_id)
        if entry_id in self._bad or folder.is_symlink():
            return None
        try:
            return codec.read_manifest(folder, entry_id)
        except FileNotFoundError:
            return None
        except BadEntry as error:
            self._reject(entry_id, error, stamp)
            return None

    def part(self, manifest: Manifest, load: Callable[[Path, Manifest], T]) -> T | None:
        """Some tensors of an entry; None when they are gone, bad or cannot be read now."""
        one = manifest["id"]
        stamp = self._folder.stamp(one)
        try:
            return load(self._folder.entry(one), manifest)
        except FileNotFoundError:
            return None
        except BadEntry as error:
            if not self._replaced(one, manifest):
                self._reject(one, error, stamp)
        except FAILURES as error:
            self._warn("read", f"entry {one} could not be read: {error}")
        return None

    def row(self, entry_id: str) -> Row | None:
        """The index row of an entry; None when it is gone or bad."""
        folder, stamp = self._folder.entry(entry_id), self._folder.stamp(entry_id)
        if entry_id in self._bad:
            return None
        try:
            manifest = codec.read_manifest(folder, entry_id)
            return row_of(manifest, codec.bytes_of(manifest, folder), codec.load_vector(folder, manifest))
        except FileNotFoundError:
            return None
        except BadEntry as error:
            self._set_aside(entry_id, error, stamp)
        except FAILURES as error:
            self._warn("read", f"entry {entry_id} could not be read: {error}")
        return None

    def fault(self, entry_id: str) -> str | None:
        """Read every file of an entry: None when sound, `GONE`, or what is wrong with it."""
        folder, stamp = self._folder.entry(entry_id), self._folder.stamp(entry_id)
        try:
            codec.load_all(folder, codec.read_manifest(folder, entry_id))
        except FileNotFoundError:
            return GONE
        except BadEntry as error:
            return str(error) if self._reject(entry_id, error, stamp) else GONE
        except FAILURES as error:
            return f"could not be read: {error}"
        return None

    def take_back(self) -> None:
        """Give what was set aside, or held to be bad, another chance: sound entries return from quarantine."""
        self._bad.clear()
        for path in self._folder.aside():
            if _sound(path):
                self._folder.take_back(path)

    def _replaced(self, entry_id: str, manifest: Manifest) -> bool:
        """Whether another process has put another entry under this id since the manifest was read."""
        try:
            return codec.read_manifest(self._folder.entry(entry_id), entry_id) != manifest
        except FileNotFoundError:
            return True
        except FAILURES:
            return False

    def _reject(self, entry_id: str, error: BadEntry, judged: Stamp) -> bool:
        """Set a bad entry aside and have it forgotten; False when it was replaced while it was read."""
        if not self._set_aside(entry_id, error, judged):
            return False
        self._forget(entry_id, entry_id not in self._bad)
        return True

    def _set_aside(self, entry_id: str, error: BadEntry, judged: Stamp) -> bool:
        try:
            if not self._movable:
                raise OSError("the bank is read-only")
            if not self._folder.set_aside(entry_id, judged):
                return False
        except OSError:
            if self._folder.stamp(entry_id) != judged:
                return False
            self._bad.add(entry_id)
        self._warn("quarantine", f"entry {entry_id} cannot be used and is set aside: {error}")
        return True


def _sound(path: Path) -> bool:
    try:
        codec.load_all(path, codec.read_manifest(path, path.name[:32]))
    except FAILURES:
        return False
    return True


def row_of(manifest: Manifest, size: int, vector: Any) -> Row:
    """The index row of an entry of `size` bytes that was never used."""
    info = codec.info_of(manifest, size)
    return Row(
        id=info.id,
        identity=info.identity.digest,
        profile=info.profile_digest,
        noise=info.noise,
        bytes=size,
        created=info.created,
        last_used=info.created,
        uses=0,
        saved_seconds=0.0,
        dense_seconds=info.dense_seconds,
        schema=manifest["schema"],
        vector=vector.tobytes(),
        card=codec.card_of(manifest),
    )
