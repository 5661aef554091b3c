"""The Reuse Cache: donors on disk, found again by text within one identity, kept by the seconds they save."""

from .entry import BadEntry, EntryDraft, EntryInfo, Refused, entry_id
from .store import Bank, Entry
from .text import text_vector

__all__ = ["BadEntry", "Bank", "Entry", "EntryDraft", "EntryInfo", "Refused", "entry_id", "text_vector"]
