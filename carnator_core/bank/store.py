"""The bank: donors kept across runs, processes and crashes. No method raises into a generation.

Reading goes on where it can; what cannot be done returns None (or nothing) and leaves a sentence in `warnings`, of
which the first of its kind is also logged.
"""

from __future__ import annotations

import functools
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from ..request import Request, begun_with
from . import entry as codec
from .catalogue import Catalogue
from .entry import EntryDraft, EntryInfo, Refused, Sealed, entry_id
from .eviction import victims
from .files import Folder, size_of, sync_folder, write_bytes
from .index import Row
from .shelf import FAILURES, GONE, Shelf, row_of
from .text import text_vector

BUDGET_BYTES = 20 * 2**30
DISK_RESERVE_BYTES = 256 * 2**20  # left free on the disk for the host's own files, at most 5 % of it
WARNINGS_KEPT = 100
Mode = Literal["on", "read-only", "off"]
T = TypeVar("T")
log = logging.getLogger("carnator")


def _never_raises(default: Callable[[], Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """A method of Bank whose failures become a warning and an empty answer."""

    def decorate(method: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(method)
        def guarded(bank: Bank, *args: Any, **kwargs: Any) -> T:
            try:
                return method(bank, *args, **kwargs)
            except FAILURES as error:
                bank._warn(method.__name__, f"the bank at {bank.root} could not {method.__name__}: {error}")
                return default()

        return guarded

    return decorate


class Entry:
    """One donor. The signature is loaded; everything else is read, and checked, when asked for.

    A part is None when the entry went away or proved bad since; nothing on disk stays open.
    """

    def __init__(self, shelf: Shelf, manifest: dict[str, Any], info: EntryInfo, signature: dict[str, torch.Tensor]):
        self._shelf, self._manifest = shelf, manifest
        self.info = info
        self.signature = signature

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Noise levels of the stored predictions, descending."""
        return self.info.prediction_sigmas

    def predictions(self) -> torch.Tensor | None:
        """x0 predictions (S, *latent) at `sigmas`, float16 or bfloat16."""
        return self._shelf.part(self._manifest, codec.load_predictions)

    def result(self) -> torch.Tensor | None:
        """The final latent, bit-equal to what was written."""
        return self._shelf.part(self._manifest, lambda folder, m: codec.load_file(folder, m, codec.RESULT)["result"])


@dataclass(frozen=True)
class Stats:
    """Numbers of a bank; sizes in bytes, saved time in seconds."""

    entries: int
    identities: int
    entry_bytes: int
    other_bytes: int  # index, quarantine, temporaries, trash
    budget_bytes: int
    quarantined: int
    uses: int
    saved_seconds: float


class Bank:
    """All donors below one folder. Safe for several threads and several processes at once.

    mode "on" reads and writes; "read-only" changes nothing on disk; "off" answers as an empty bank.
    Nothing is opened or created before the first call that needs it.
    """

    def __init__(self, root: Path | str, budget_bytes: int = BUDGET_BYTES, mode: Mode = "on"):
        if mode not in ("on", "read-only", "off"):
            raise ValueError(f"mode {mode!r} is unknown; use 'on', 'read-only' or 'off'")
        if budget_bytes <= 0:
            raise ValueError(f"the budget must be positive, got {budget_bytes} bytes; use mode='off' for no bank")
        self.root, self.budget_bytes, self.mode = Path(root), int(budget_bytes), mode
        self.warnings: list[str] = []
        self.noted = 0  # how many warnings there have been, also those that are no longer kept
        self._logged: set[str] = set()
        self._swept = False
        self._folder = Folder(self.root)
        self._shelf = Shelf(self._folder, mode == "on", self._warn, self._forget)
        self._catalogue = Catalogue(self._folder, mode == "on", self._shelf.row, lambda text: self._warn("index", text))

    def close(self) -> None:
        """Close the index; the next call opens it again."""
        self._catalogue.close()

    def __enter__(self) -> Bank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _warn(self, kind: str, text: str) -> None:
        self._note(text)
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning("Carnator: %s", text)

    def _forget(self, entry_id: str, moved: bool) -> None:
        if moved:
            self._catalogue.forget([entry_id])
        else:
            self._catalogue.drop(entry_id)

    def _note(self, text: str) -> None:
        self.warnings.append(text)
        self.noted += 1
        del self.warnings[:-WARNINGS_KEPT]

    def warnings_since(self, noted: int) -> list[str]:
        """The warnings since `noted` had this value, as far as they are kept, each once."""
        fresh = min(self.noted - noted, len(self.warnings))
        return list(dict.fromkeys(self.warnings[len(self.warnings) - fresh :]))

    # --- finding ---

    @_never_raises(lambda: None)
    def exact(self, request: Request) -> EntryInfo | None:
        """The entry of this very request: same identity, same profile."""
        if self.mode == "off":
            return None
        manifest = self._shelf.manifest(entry_id(request))
        return self._info(manifest) if manifest else None

    @_never_raises(list)
    def recall(self, request: Request, k: int = 10, only_same_noise: bool = False) -> list[EntryInfo]:
        """At most k entries of the same identity, the nearest text first; equal texts with the same noise lead.

        `only_same_noise`: of the runs alone that began with the request's own noise, however many others are nearer.
        """
        if self.mode == "off" or k <= 0:
            return []
        profile, identity = request.profile, request.identity.digest
        vector = text_vector(profile.conditioning)
        near = self._catalogue.nearest(identity, vector, begun_with(profile.noise), k, only_same_noise)
        infos = (self._info_of_row(row, similarity) for row, similarity in near)
        return [info for info in infos if info and info.identity == request.identity]

    @_never_raises(lambda: None)
    def open(self, entry_id: str) -> Entry | None:
        """An entry with its signature; None when it went away or is bad (then it goes to quarantine)."""
        if self.mode == "off":
            return None
        manifest = self._shelf.manifest(entry_id)
        if manifest is None:
            return None
        signature = self._shelf.part(manifest, lambda folder, m: codec.load_file(folder, m, codec.SIGNATURE))
        if signature is None:
            return None
        del signature[codec.TEXT]
        return Entry(self._shelf, manifest, self._info(manifest), signature)

    @_never_raises(lambda: None)
    def result(self, entry_id: str) -> torch.Tensor | None:
        """The final latent of an entry, bit-equal to what was written."""
        manifest = None if self.mode == "off" else self._shelf.manifest(entry_id)
        if manifest is None:
            return None
        return self._shelf.part(manifest, lambda folder, m: codec.load_file(folder, m, codec.RESULT)["result"])

    @_never_raises(str)
    def explain_empty(self, request: Request) -> str:
        """Why recall offers nothing, for a report; "" when it would offer something."""
        if self.mode == "off":
            return "the bank is off"
        rows = self._catalogue.rows()
        if any(row.identity == request.identity.digest for row in rows):
            return ""
        if not rows:
            return "the bank is empty"
        latest = self._info_of_row(max(rows, key=lambda row: row.last_used))
        part = request.identity.difference(latest.identity) if latest else "identity"
        return f"none of {len(rows)} entries has the same identity; the latest differs in {part}"

    # --- writing ---

    def write(self, draft: EntryDraft) -> str | None:
        """Keep a computed run; its id, or None with the reason in `warnings`.

        A request that is already here keeps its first entry. Entries of least value make room.
        """
        if self.mode != "on":
            self._note(f"the run was not kept: the bank is {self.mode}")
            return None
        try:
            return self._write(draft)
        except Refused as error:
            self._warn("refused", f"the run was not kept: {error}")
        except FAILURES as error:
            remedy = "free space, check the folder's permissions or choose another"
            self._warn("write", f"the run could not be kept in {self.root}: {error}; {remedy}")
        return None

    def _write(self, draft: EntryDraft) -> str:
        codec.check_draft(draft)
        if codec.draft_bytes(draft) > self.budget_bytes:
            raise Refused(self._too_large(codec.draft_bytes(draft)))
        one = entry_id(draft.request)
        if self._shelf.manifest(one) is not None:
            self._catalogue.sync()
            return one
        self._folder.make()
        self._sweep_once()
        sealed = codec.seal(draft)
        self._make_room(sealed.bytes)
        if self._publish(sealed):
            self._catalogue.put(row_of(sealed.manifest, sealed.bytes, sealed.vector))
        else:
            self._catalogue.sync()
        self._make_room(0, keep=one)
        return one

    def _publish(self, sealed: Sealed) -> bool:
        """Whether this writer's entry is the one that is there now; else another process was first."""
        temporary = self._folder.temporary()
        try:
            for name, data in sealed.files.items():
                write_bytes(temporary / name, data)
            sync_folder(temporary)
            if self._folder.publish(temporary, sealed.id):
                return True
            if self._shelf.manifest(sealed.id) is not None:
                return False
            if self._folder.publish(temporary, sealed.id):  # a bad one was there and has left the name free
                return True
            raise OSError(f"entry {sealed.id} is there, bad, and cannot be moved away")
        finally:
            if temporary.exists():
                self._discard(temporary)

    def _discard(self, path: Path) -> bool:
        try:
            self._folder.discard(path)
        except OSError as error:
            self._warn("delete", f"{path} could not be deleted and is tried again later: {error}")
            return False
        return True

    def _sweep_once(self) -> None:
        if not self._swept:
            self._swept = True
            self._folder.sweep()

    def _too_large(self, size: int) -> str:
        return f"the entry needs {size} bytes and the budget is {self.budget_bytes}; raise the budget of the bank"

    def _make_room(self, need: int, keep: str = "") -> list[str]:
        """Remove what is worth least until `need` more bytes fit. Raises Refused when they cannot. Returns the ids."""
        if need and need > self.budget_bytes:
            raise Refused(self._too_large(need))
        over = self._over(need)
        if over > 0:
            self._catalogue.shrink()
            over = self._over(need)
        for old in self._folder.aside():  # nothing good is given up while something bad is kept
            if over <= 0:
                break
            size = size_of(old)
            over -= size if self._discard(old) else 0
        gone = self._evict(over, keep)
        if need:
            self._check_space(need)
        return gone

    def _over(self, need: int) -> int:
        return self._catalogue.total_bytes() + self._folder.other_bytes() + need - self.budget_bytes

    def _evict(self, over: int, keep: str) -> list[str]:
        if over <= 0:
            return []
        chosen = victims(self._catalogue.rows(), over, time.time(), keep)
        return [one for one in chosen if self._remove(one)]

    def _check_space(self, need: int) -> None:
        if self._over(need) > 0:
            raise Refused(
                f"the entry needs {need} bytes and index, quarantine and files in use leave no room for it in a budget"
                f" of {self.budget_bytes}; raise the budget of the bank"
            )
        disk = shutil.disk_usage(self.root)
        reserve = min(DISK_RESERVE_BYTES, disk.total // 20)
        if disk.free - need < reserve:
            raise OSError(f"only {disk.free} bytes are free on the disk, {need} are needed and {reserve} stay reserved")

    @_never_raises(lambda: None)
    def touch(self, entry_id: str, saved_seconds: float) -> None:
        """Count a hit, which makes the entry worth keeping longer. Nothing happens unless the mode is "on"."""
        if self.mode == "on":
            self._folder.entry(entry_id)
            saved = saved_seconds if saved_seconds > 0 else 0.0  # neither negative nor NaN
            self._catalogue.touch(entry_id, float(saved), time.time())

    # --- keeping house ---

    @_never_raises(list)
    def ls(self) -> list[EntryInfo]:
        """All entries, the latest used first."""
        if self.mode == "off":
            return []
        infos = (self._info_of_row(row) for row in self._catalogue.rows())
        return sorted((info for info in infos if info), key=lambda info: -info.last_used)

    @_never_raises(lambda: None)
    def show(self, entry_id: str) -> dict[str, Any] | None:
        """All that entry.json holds, with size and use."""
        manifest = None if self.mode == "off" else self._shelf.manifest(entry_id)
        if manifest is None:
            return None
        info = self._info(manifest)
        usage = {"bytes": info.bytes, "uses": info.uses, "last_used": info.last_used}
        return {**manifest, **usage, "saved_seconds": info.saved_seconds}

    @_never_raises(lambda: False)
    def remove(self, entry_id: str) -> bool:
        """Delete an entry; whether it was there and is gone."""
        if self.mode != "on":
            self._note(f"nothing was removed: the bank is {self.mode}")
            return False
        return self._folder.has(entry_id) and self._remove(entry_id)

    def _remove(self, entry_id: str) -> bool:
        if not self._discard(self._folder.entry(entry_id)):
            return False
        self._catalogue.forget([entry_id])
        return True

    def verify(self, progress: Callable[[list[str]], Iterable[str]] = iter) -> dict[str, str | None]:
        """Read and check every file of every entry: id -> None when sound, else the reason (and quarantine)."""
        if self.mode == "off":
            return {}
        found = {one: self._shelf.fault(one) for one in progress(sorted(self._folder.ids()))}
        return {one: reason for one, reason in found.items() if reason != GONE}

    @_never_raises(dict)
    def gc(self) -> dict[str, int]:
        """Sweep leftovers, bring the index in line, evict down to the budget. Returns counts by name."""
        if self.mode != "on" or not self._folder.entries.is_dir():
            return {"swept": 0, "evicted": 0, "entries": len(self.ls())}
        swept = self._folder.sweep()
        self._catalogue.sync()
        evicted = self._make_room(0)
        return {"swept": swept, "evicted": len(evicted), "entries": len(self._catalogue.rows())}

    @_never_raises(lambda: 0)
    def rebuild(self) -> int:
        """Make the index anew from the entries, and take back from quarantine what is readable (as after an upgrade).

        Returns the number of entries.
        """
        if self.mode != "on":
            self._note(f"nothing was rebuilt: the bank is {self.mode}")
            return 0
        self._shelf.take_back()
        return self._catalogue.rebuild()

    def stats(self) -> Stats:
        """Counts and sizes; zeros when the bank is off or cannot be read."""
        rows = self._rows()
        return Stats(
            entries=len(rows),
            identities=len({row.identity for row in rows}),
            entry_bytes=sum(row.bytes for row in rows),
            other_bytes=self._folder.other_bytes(),
            budget_bytes=self.budget_bytes,
            quarantined=len(self._folder.aside()),
            uses=sum(row.uses for row in rows),
            saved_seconds=sum(row.saved_seconds for row in rows),
        )

    @_never_raises(list)
    def _rows(self) -> list[Row]:
        return [] if self.mode == "off" else self._catalogue.rows()

    # --- telling of one entry ---

    def _info(self, manifest: dict[str, Any]) -> EntryInfo:
        row = self._catalogue.row(manifest["id"])
        size = row.bytes if row else codec.bytes_of(manifest)
        return codec.info_of(manifest, size, **_usage(row))

    def _info_of_row(self, row: Row, similarity: float | None = None) -> EntryInfo | None:
        """From the index alone; from the entry where the index is damaged."""
        try:
            return codec.info_of(json.loads(row.card), row.bytes, similarity=similarity, **_usage(row))
        except (KeyError, TypeError, ValueError):
            manifest = self._shelf.manifest(row.id)
        return replace(self._info(manifest), similarity=similarity) if manifest else None


def _usage(row: Row | None) -> dict[str, Any]:
    names = ("uses", "last_used", "saved_seconds")
    return {name: getattr(row, name) for name in names} if row else {}
