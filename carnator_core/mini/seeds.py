"""The three disjoint seed ranges of the project, and which captions belong to which.

Nothing may be tuned on PROOF. A scene (a tuple of attributes) belongs to one range by a stable hash of its
attributes, so that a caption seen in training or calibration is never one that a proof is shown on.
"""

from __future__ import annotations

import hashlib

FIT = range(0, 1_000_000)
CALIBRATE = range(1_000_000, 2_000_000)
PROOF = range(2_000_000, 3_000_000)

RANGES = {"fit": FIT, "calibrate": CALIBRATE, "proof": PROOF}


def split_of_seed(seed: int) -> str:
    """The name of the range that holds `seed`; ValueError when none does."""
    for name, seeds in RANGES.items():
        if seed in seeds:
            return name
    raise ValueError(f"seed {seed} lies in no range; use 0 to {PROOF.stop - 1}")


def split_of_key(key: str) -> str:
    """The range a scene belongs to: 80 % fit, 10 % calibrate, 10 % proof, by a stable hash of its key."""
    bucket = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 10
    return {0: "calibrate", 1: "proof"}.get(bucket, "fit")
