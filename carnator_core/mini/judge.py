"""A judge by measurement: reads every attribute of a clip back from its pixels, without being told the prompt.

Nothing here is learned. `measure` fits the world's own pattern and the world's own objects to a clip and says how well
they fit; `judge` turns a fit beyond `TOLERANCES` into "unreadable". An attribute is therefore read only from a clip
that as a whole looks like one scene, filmed by one camera: blends, seams, frozen or shuffled frames do not pass.

`python -m carnator_core.mini.judge_calibration` reprints everything that the tolerances were derived from.

Inside, a clip is v (3, T, H, W) in [0, 1]; a region of the picture is one of its quadrants, halves or frames.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from . import world
from .judge_background import background_of, film_of, lead_of, model_of, stray_of, tone_of
from .judge_objects import alpha_of, colour_of, fit_objects
from .judge_pixels import grow, local_mean
from .world import ATTRIBUTES, FRAMES, Scene

OBJECT_ATTRIBUTES = ("object", "colour", "motion", "size", "count")
WORLD_ATTRIBUTES = ("background", "camera")

# How the tolerances were chosen: `python -m carnator_core.mini.judge_calibration --renders 400` (seeds, scenes of the
# calibration split) gives the worst value of a measure over 800 renders of truth, and its median over the corruptions
# that this measure is there to catch. A tolerance lies about midway between the two, not at the edge of truth, because
# a learned model's clips have softer edges and a slightly different texture. `fit_error` and `agreement` lie nearer to
# truth, as a few blends and seams are caught by them alone.
# "most": larger is refused; "least": smaller is refused.
TOLERANCES: dict[str, tuple[str, float]] = {  # worst truth; what it catches
    "fit_error": ("most", 0.08),  # 0.019; 0.11 to 0.8, least 0.11 in blends of any two scenes
    "drift": ("most", 0.016),  # 0.004; one frame twice 0.028
    "speed_error": ("most", 0.015),  # 0.002; one frame twice 0.020, shuffled 0.029
    "stray": ("most", 0.025),  # 0.004; blends one word apart 0.071
    "pattern_fit": ("least", 0.70),  # 0.87; blends 0.55
    "agreement": ("least", 0.83),  # 0.85; seams between two seeds -0.02
    "lead": ("least", -0.15),  # -0.11; shuffled -0.31, two neighbouring frames swapped in a zoom -0.26 or less
    "tint": ("most", 0.065),  # 0.035; blends of two backgrounds 0.10
}
_CONCERNS = {  # which attributes a measure beyond its tolerance makes unreadable
    "fit_error": OBJECT_ATTRIBUTES,
    "drift": OBJECT_ATTRIBUTES,
    "speed_error": ("motion",),
    "stray": (*OBJECT_ATTRIBUTES, *WORLD_ATTRIBUTES),
    "pattern_fit": WORLD_ATTRIBUTES,
    "agreement": WORLD_ATTRIBUTES,
    "lead": WORLD_ATTRIBUTES,
    "tint": WORLD_ATTRIBUTES,
}


@dataclass(frozen=True)
class Verdict:
    """What a clip shows. `attributes` holds a word of `world.ATTRIBUTES`, or None for what cannot be read."""

    attributes: dict[str, str | None]
    fit_error: float  # of the objects: squared error over the mask's energy; 0 is exact, infinite when none is seen
    pattern_fit: float  # correlation of the background with the best pattern, in [-1, 1]
    reasons: tuple[str, ...]  # why something is unreadable


@dataclass(frozen=True)
class Measures:
    """The best explanation of a clip and how well it holds.

    `words` is the best guess whatever the fit. `drift`: the objects' root mean square distance from uniform motion, in
    units of 32 pixels; `speed_error`: distance of their velocity from the nearest motion, in such units a frame;
    `stray`: share of the background that is neither pattern nor texture; `agreement`: the least similarity of
    the pattern between two halves of the picture or one frame and the others, in [-1, 1]; `lead`: by how much the
    camera explains the step between two frames better than the next best camera, the worst of all steps, in
    correlation; `tint`: the largest distance of any region from the background's palette colour, in RGB less grey.
    """

    words: dict[str, str | None]
    fit_error: float = math.inf
    drift: float = math.inf
    speed_error: float = math.inf
    stray: float = 1.0
    pattern_fit: float = 0.0
    agreement: float = -1.0
    lead: float = -1.0
    tint: float = math.inf


def judge(clip: torch.Tensor) -> Verdict:
    """Read one clip (3, T, H, W) in [-1, 1], H == W, T == world.FRAMES."""
    if clip.shape[:2] != (3, FRAMES) or clip.ndim != 4 or clip.shape[2] != clip.shape[3]:
        raise ValueError(f"a clip has the shape (3, {FRAMES}, size, size), not {tuple(clip.shape)}")
    if not torch.isfinite(clip).all():
        return Verdict(dict.fromkeys(ATTRIBUTES), math.inf, 0.0, ("the clip holds numbers that are not finite",))
    return verdict_on(measure(clip))


def verdict_on(found: Measures) -> Verdict:
    """What a clip shows, given its measures: the best guess where every tolerance is kept."""
    words, reasons = dict(found.words), []
    if words["colour"] is None:
        reasons.append("no object's colour is seen in every frame")
    for name, (sense, bound) in TOLERANCES.items():
        value = getattr(found, name)
        if value > bound if sense == "most" else value < bound:
            words.update(dict.fromkeys(_CONCERNS[name]))
            reasons.append(f"{name.replace('_', ' ')} is {value:.3f}, at {sense} {bound:g} is readable")
    return Verdict(words, found.fit_error, found.pattern_fit, tuple(reasons))


def faithfulness(verdict: Verdict, scene: Scene) -> dict[str, bool]:
    """Which attributes of `scene` the clip shows; an unreadable one counts as wrong."""
    return {name: verdict.attributes[name] == getattr(scene, name) for name in ATTRIBUTES}


@torch.no_grad()
def measure(clip: torch.Tensor) -> Measures:
    """Measure one finite clip (3, T, H, W) in [-1, 1]."""
    v = (clip.detach().float().cpu().clamp(-1, 1) + 1) / 2
    words: dict[str, str | None] = dict.fromkeys(ATTRIBUTES)
    words["colour"], support = colour_of(v)
    free = 1 - grow(support, 2)
    words["background"] = background_of(v, free)
    base = torch.tensor(world.BACKGROUNDS[words["background"]])
    film = film_of(tone_of(v, base), free)
    words["camera"] = film.camera
    model, tint = model_of(v, base, film.pattern, free)
    rest = v - model
    found = {
        "pattern_fit": film.fit,
        "agreement": film.agreement,
        "lead": lead_of(v, free, film.camera),
        "tint": tint,
        "stray": stray_of(rest, free),
    }
    if words["colour"] is not None:
        soft = alpha_of(v, model + local_mean(rest, free), support, words["colour"])
        found |= fit_objects(soft, grow(support, 2), words)
    return Measures(words, **found)
