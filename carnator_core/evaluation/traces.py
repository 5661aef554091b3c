"""Traces: pairs of a target and the donor that came before it, as people iterate on a prompt.

A method never learns which attribute changed; only the tables do.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..mini import world
from ..mini.seeds import RANGES

KINDS = ("one-word", "several-words", "paraphrase", "seed-only", "same", "new-scene")
OFFSET = 500_000  # noise seeds of the harness lie apart from those of `mini.evaluate`


@dataclass(frozen=True)
class Pair:
    kind: str
    target: world.Scene
    donor: world.Scene
    prompt: str  # the target's
    donor_prompt: str
    seed: int  # the target's noise
    donor_seed: int

    @property
    def changed(self) -> tuple[str, ...]:
        """Attributes that differ."""
        return tuple(n for n in world.ATTRIBUTES if getattr(self.target, n) != getattr(self.donor, n))


def _several(scene: world.Scene, rng: random.Random) -> world.Scene:
    for name in rng.sample(list(world.ATTRIBUTES), rng.choice((2, 3))):
        _, scene = world.one_word_neighbour(scene, rng, name)
    return scene


def _donor(kind: str, target: world.Scene, rng: random.Random) -> world.Scene:
    if kind == "one-word":
        return world.one_word_neighbour(target, rng)[1]
    if kind == "several-words":
        return _several(target, rng)
    return world.random_scene(rng) if kind == "new-scene" else target


def pairs(split: str, kind: str, count: int, seed: int = 0) -> list[Pair]:
    """`count` pairs whose target is of the split; drawn by `seed` (0 to 99). ValueError for an unknown kind or split.

    The donor's scene may be of any split: what a person asked before is not held out, what is judged is.
    """
    if kind not in KINDS or split not in RANGES:
        raise ValueError(f"no pairs of kind {kind!r} and split {split!r}; kinds are {', '.join(KINDS)}")
    rng = random.Random(f"{kind} {split} {seed}")
    first = RANGES[split].start + OFFSET + seed * 4000
    out = []
    for i in range(count):
        target = world.random_scene(rng, split)
        donor = _donor(kind, target, rng)
        phrasing = rng.randrange(len(world.PHRASINGS))
        other = (phrasing + rng.choice((1, 2))) % len(world.PHRASINGS) if kind == "paraphrase" else phrasing
        seeds = first + 2 * i, first + 2 * i + (kind == "seed-only")
        out.append(Pair(kind, target, donor, world.caption(target, phrasing), world.caption(donor, other), *seeds))
    return out


@dataclass(frozen=True)
class Ask:
    """One request of a session."""

    kind: str
    scene: world.Scene
    prompt: str
    seed: int


MIX = (("one-word", 0.5), ("several-words", 0.12), ("seed-only", 0.12), ("same", 0.1), ("new-scene", 0.16))


def session(split: str, length: int, seed: int = 0, mix: Sequence[tuple[str, float]] = MIX) -> list[Ask]:
    """A person at work: a scene, then changes of it, the same again, another seed, now and then something new."""
    rng = random.Random(f"session {split} {seed}")
    noise = RANGES[split].start + OFFSET + 400_000 + seed * 1000
    scene, phrasing, out = world.random_scene(rng, split), rng.randrange(len(world.PHRASINGS)), []
    kinds, weights = zip(*mix, strict=True)
    for i in range(length):
        kind = rng.choices(kinds, weights)[0] if i else "new-scene"
        if kind == "one-word":
            scene = world.one_word_neighbour(scene, rng)[1]
        elif kind == "several-words":
            scene = _several(scene, rng)
        elif kind == "new-scene":
            scene, phrasing = world.random_scene(rng, split), rng.randrange(len(world.PHRASINGS))
        noise += kind == "seed-only"
        out.append(Ask(kind, scene, world.caption(scene, phrasing), noise))
    return out
