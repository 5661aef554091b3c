"""Whose noise a run starts from: the user's own, or by opt-in the nearest donor's, without which nothing is lent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..bank import Bank, EntryInfo
from ..request import Request, same_noise

OWN, DONOR = "own", "donor"
SEED_POLICIES = (OWN, DONOR)

N = TypeVar("N")


def lender_of_noise(request: Request, bank: Bank) -> EntryInfo | None:
    """The nearest donor by text, if it started from other noise whose seed is known; else None."""
    nearest = bank.recall(request, 1)
    if not nearest or nearest[0].seed is None or same_noise(nearest[0].noise, request.profile.noise):
        return None
    return nearest[0]


def with_donors_noise(
    request: Request, bank: Bank, again: Callable[[int], tuple[N, Request]]
) -> tuple[N, Request, str] | None:
    """The noise to start from instead, its request, and a line for the report; None to keep the user's own.

    `again(seed)` makes the host's noise of a seed and the request that it leads to. Noise is taken only if it is the
    donor's own by digest: another version of a host may draw other numbers from a seed.
    """
    donor = lender_of_noise(request, bank)
    if donor is None:
        return None
    noise, changed = again(donor.seed)
    if not same_noise(changed.profile.noise, donor.noise):
        return None
    return noise, changed, f"seed {donor.seed} of donor {donor.id[:8]} was taken instead of your own (seed policy)"
