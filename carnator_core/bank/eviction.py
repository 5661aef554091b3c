"""Which entries go first: those that save the least for the room they take."""

from __future__ import annotations

from collections.abc import Iterable

from .index import Row

HALF_LIFE_SECONDS = 30 * 86400.0


def value(row: Row, now: float) -> float:
    """Dense seconds a byte can save, by uses so far, halved for every 30 days without one."""
    age = max(0.0, now - row.last_used)
    return row.dense_seconds * (row.uses + 1) / max(1, row.bytes) * 0.5 ** (age / HALF_LIFE_SECONDS)


def victims(rows: Iterable[Row], need: int, now: float, keep: str = "") -> list[str]:
    """Ids to remove, least valuable first, until `need` bytes are free; equal values go by last use."""
    chosen: list[str] = []
    for row in sorted(rows, key=lambda row: (value(row, now), row.last_used, row.id)):
        if need <= 0:
            break
        if row.id != keep:
            chosen.append(row.id)
            need -= row.bytes
    return chosen
