"""The bank's folder: names, durable writes, moves and deletions. Knows nothing of what an entry holds.

<root>/entries/<id>/         one entry, complete from the moment its name appears
<root>/quarantine/<id>-<ns>/ entries that could not be read
<root>/.tmp-<pid>-<host>-*   an entry on its way in
<root>/.trash-<pid>-*        an entry on its way out; what could not be deleted is retried
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

ID = re.compile(r"[0-9a-f]{32}\Z")
QUARANTINE_LIMIT = 32
STALE_SECONDS = 3600.0
_TEMPORARY = re.compile(r"\.tmp-(\d+)-([0-9a-f]{8})-[0-9a-f]+\Z")
_ASIDE = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}\Z")
Stamp = tuple[int, int] | None  # inode and time of the last change
_HOST = hashlib.blake2b(platform.node().encode(), digest_size=4).hexdigest()


def write_bytes(path: Path, data: bytes) -> None:
    """A new file with this content, on the disk when the call returns. Raises OSError."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make names inside a folder durable; Windows has no such call and journals names itself."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename(source: Path, target: Path) -> None:
    """os.rename; on Windows repeated for 0.3 s, because a reader or a scanner may hold a file for a moment."""
    for attempt in range(4):
        try:
            os.rename(source, target)
            return
        except PermissionError:
            if os.name != "nt" or attempt == 3 or target.exists():
                raise
            time.sleep(0.1)


def size_of(path: Path) -> int:
    """Bytes of all files below a path; what vanishes meanwhile counts nothing."""
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return status.st_size
        return sum(size_of(Path(item.path)) for item in os.scandir(path))
    except OSError:
        return 0


def _stamp(path: Path) -> Stamp:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _alive(pid: int) -> bool:
    if os.name == "nt":  # signal 0 would be Ctrl-C there; the age rule alone decides
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


class Folder:
    """Paths below one root. Every path is made from constants and ids that match `ID`."""

    def __init__(self, root: Path):
        self.root = Path(root)
        self.entries = self.root / "entries"
        self.quarantine = self.root / "quarantine"
        self.index = self.root / "index.sqlite"

    def make(self) -> None:
        self.entries.mkdir(parents=True, exist_ok=True)

    def entry(self, entry_id: str) -> Path:
        """The entry's folder. ValueError for anything that is not an id."""
        if not isinstance(entry_id, str) or not ID.match(entry_id):
            raise ValueError(f"{str(entry_id)[:40]!r} is no entry id; an id is 32 hexadecimal digits")
        return self.entries / entry_id

    def has(self, entry_id: str) -> bool:
        return os.path.isdir(self.entry(entry_id))

    def ids(self) -> list[str]:
        """Ids of all folders in entries/; links and foreign names are not ours."""
        try:
            with os.scandir(self.entries) as items:
                return [item.name for item in items if ID.match(item.name) and item.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def changed(self) -> int:
        """A number that moves when an entry appears or goes (as finely as the file system tells time)."""
        try:
            return os.stat(self.entries).st_mtime_ns
        except OSError:
            return 0

    def temporary(self) -> Path:
        path = self.root / f".tmp-{os.getpid()}-{_HOST}-{secrets.token_hex(8)}"
        path.mkdir()
        return path

    def publish(self, temporary: Path, entry_id: str) -> bool:
        """Give a finished temporary its name; False when an entry of that name is there first."""
        target = self.entry(entry_id)
        try:
            rename(temporary, target)
        except OSError:
            if target.is_dir():
                return False
            raise
        sync_folder(self.entries)
        return True

    def discard(self, path: Path) -> None:
        """Delete a folder: it loses its name at once, its bytes now or in a later sweep. OSError if it stays."""
        trash = self.root / f".trash-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            rename(path, trash)
        except FileNotFoundError:
            return
        _delete(trash)

    def stamp(self, entry_id: str) -> Stamp:
        """What tells an entry's folder from one that takes its name later; None when there is none."""
        return _stamp(self.entry(entry_id))

    def set_aside(self, entry_id: str, judged: Stamp) -> bool:
        """Move the unreadable entry of that stamp to quarantine; the oldest there make room.

        False when another process has moved or replaced it since. OSError if it stays.
        """
        if judged is None or self.stamp(entry_id) != judged:
            return False
        self.quarantine.mkdir(exist_ok=True)
        target = self.quarantine / f"{entry_id}-{time.time_ns():016x}"
        try:
            rename(self.entry(entry_id), target)
        except FileNotFoundError:
            return False
        if _stamp(target) != judged:  # replaced between the look and the move
            self.take_back(target)
            return False
        for old in self.aside()[:-QUARANTINE_LIMIT]:
            self.discard(old)
        return True

    def take_back(self, path: Path) -> bool:
        """Return a quarantined folder to the entries; False when its id is taken."""
        return self.publish(path, path.name[:32])

    def aside(self) -> list[Path]:
        """What is in quarantine, oldest first."""
        try:
            found = [Path(item.path) for item in os.scandir(self.quarantine) if _ASIDE.match(item.name)]
        except OSError:
            return []
        return sorted(found, key=lambda path: path.name[33:])

    def _hidden(self) -> Iterator[Path]:
        try:
            names = os.listdir(self.root)
        except OSError:
            return
        for name in names:
            if name.startswith(".trash-") or _TEMPORARY.match(name):
                yield self.root / name

    def sweep(self) -> int:
        """Delete trash, and temporaries whose writer is dead or that are older than an hour. Returns how many."""
        count = 0
        for path in self._hidden():
            if path.name.startswith(".trash-") or _abandoned(path):
                count += _delete(path)
        return count

    def other_bytes(self) -> int:
        """Bytes on disk beside the entries: index, quarantine, temporaries, trash."""
        index = [self.index.with_name(self.index.name + suffix) for suffix in ("", "-wal", "-shm")]
        return sum(size_of(path) for path in (*index, self.quarantine, *self._hidden()))


def _abandoned(path: Path) -> bool:
    match = _TEMPORARY.match(path.name)
    if match and match[2] == _HOST and not _alive(int(match[1])):
        return True
    try:
        return time.time() - path.stat().st_mtime > STALE_SECONDS
    except OSError:
        return False


def _delete(path: Path) -> bool:
    """Whether the path is gone; what another process still reads on Windows stays for the next sweep."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError:
        return not os.path.lexists(path)
    return True
