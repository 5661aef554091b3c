"""A judge by measurement: reads every attribute of a clip back from its pixels, without being told the prompt.

Nothing here is learned. `measure` fits the world's own pattern and the world's own objects to a clip and says how well
they fit; `judge` turns a fit beyond `TOLERANCES` into "unreadable". An attribute is therefore read only from a clip
that as a whole looks like one scene, filmed by one camera: blends, seams, frozen or shuffled frames do not pass.

`python -m carnator_core.mini.judge_calibration` reprints everything that the tolerances were derived from.

Inside, a clip is v (3, T, H, W) in [0, 1]; a region of the picture is one of its quadrants, halves or frames.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F

from . import world
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
    "fit_error": ("most", 0.08),  # 0.011; 0.12 to 0.8, least 0.11 in blends of any two scenes
    "drift": ("most", 0.016),  # 0.003; one frame twice 0.028
    "speed_error": ("most", 0.015),  # 0.002; one frame twice 0.020, shuffled 0.029
    "stray": ("most", 0.025),  # 0.015; blends one word apart 0.059
    "pattern_fit": ("least", 0.70),  # 0.84; blends 0.56
    "agreement": ("least", 0.83),  # 0.93; seams between two seeds -0.07
    "lead": ("least", -0.15),  # 0.01; shuffled -0.37, two neighbouring frames swapped in a zoom -0.26 or less
    "tint": ("most", 0.065),  # 0.033; blends of two backgrounds 0.10
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

REACH = 0.17  # RGB distance within which a pixel counts as an object's; no background comes that close to a colour
GAINS = (0.88, 1.12)  # the layout's gain, with room for a clip that is a little too bright or too dark
LEAST_PIXELS = 4  # of an object's own colour in every frame
SOFTNESS = 0.6  # blur of an object's edge that a learned model may leave, in pixels
SCALES = (0.94, 1.06)  # the layout's change of size, with a little room
PLAUSIBLE = 7  # hypotheses, of 16, whose area is near enough to what is seen to be rendered
CANDIDATES = 2  # hypotheses that survive the coarse comparison
STEPS = 2  # Gauss-Newton steps for each of them
NEARBY = 5  # pixels, the side of the square that a local mean is taken over


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
    words["colour"], support = _colour(v)
    free = 1 - _grow(support, 2)
    words["background"] = _background(v, free)
    base = torch.tensor(world.BACKGROUNDS[words["background"]])
    film = _film(_signal(v, base), free)
    words["camera"] = film.camera
    model, tint = _model(v, base, film.pattern, free)
    rest = v - model
    found = {
        "pattern_fit": film.fit,
        "agreement": film.agreement,
        "lead": _lead(v, free, film.camera),
        "tint": tint,
        "stray": _stray(rest, free),
    }
    if words["colour"] is not None:
        soft = _alpha(v, model + _local_mean(rest, free), support, words["colour"])
        found |= _objects(soft, _grow(support, 2), words)
    return Measures(words, **found)


# --- objects -----------------------------------------------------------------------------------------------------


def _grow(mask: torch.Tensor, pixels: int) -> torch.Tensor:
    """(T, H, W) of 0 and 1, every 1 spread by so many pixels."""
    return F.max_pool2d(mask[:, None], 2 * pixels + 1, 1, pixels)[:, 0]


def _colour(v: torch.Tensor) -> tuple[str | None, torch.Tensor]:
    """The objects' colour and where it is seen (T, H, W) of 0 and 1; None and nowhere if a frame shows none."""
    colours = torch.tensor(list(world.COLOURS.values()))
    gain = torch.einsum("kc,cthw->kthw", colours, v) / colours.pow(2).sum(1).view(-1, 1, 1, 1)
    nearest = gain.clamp(*GAINS)[:, None] * colours.view(-1, 3, 1, 1, 1)
    distance = (v - nearest.clamp(max=1)).pow(2).sum(1).sqrt()
    best = distance.argmin(0)
    hit = (best == torch.arange(len(colours)).view(-1, 1, 1, 1)) & (distance < REACH)
    winner = int(hit.sum((1, 2, 3)).argmax())
    support = hit[winner].float()
    if support.sum((1, 2)).min() <= LEAST_PIXELS:
        return None, torch.zeros_like(support)
    return list(world.COLOURS)[winner], support


def _alpha(v: torch.Tensor, back: torch.Tensor, support: torch.Tensor, colour: str) -> torch.Tensor:
    """How much of every pixel is object, (T, H, W) in [0, 1], sharpened by `_sharpen`."""
    pure = torch.tensor(world.COLOURS[colour])
    gains = torch.einsum("c,cthw->thw", pure, v)[support > 0] / pure.pow(2).sum()
    front = (pure * gains.median().clamp(*GAINS)).clamp(max=1).view(3, 1, 1, 1)
    way = front - back
    heard = torch.einsum("cd,dthw->cthw", torch.linalg.inv(_NOISE), way)  # the projection that hears least texture
    return _sharpen(((v - back) * heard).sum(0) / (way * heard).sum(0).clamp(min=1e-3))


def _sharpen(alpha: torch.Tensor) -> torch.Tensor:
    """Coverage with the texture's noise around 0 and 1 cut off; done to what is seen and to what is compared."""
    return ((alpha - 0.2) / 0.6).clamp(0, 1)


def _objects(soft: torch.Tensor, near: torch.Tensor, words: dict[str, str | None]) -> dict[str, float]:
    """Fit motion, kind, size and count to the mask `soft`; fills `words`, returns the measures."""
    track = _centroids(soft * near)
    velocity, drift = _uniform_motion(track)
    speeds = {name: math.dist(velocity, speed) for name, speed in world.MOTIONS.items()}
    words["motion"] = min(speeds, key=speeds.get)
    error, best = _best_object(soft, tuple(track.mean(0).tolist()), words)
    words.update(object=best.object, size=best.size, count=best.count)
    energy = float(soft.pow(2).sum())
    return {"fit_error": error / max(energy, 1e-6), "drift": drift, "speed_error": speeds[words["motion"]]}


def _centroids(mask: torch.Tensor) -> torch.Tensor:
    """(T, 2): x and y of the mask's centre of mass in every frame."""
    x, y = world.pixel_centres(mask.shape[-1])
    mass = mask.sum((1, 2)).clamp(min=1e-6)
    return torch.stack(((mask * x).sum((1, 2)) / mass, (mask * y).sum((1, 2)) / mass), -1)


def _uniform_motion(track: torch.Tensor) -> tuple[list[float], float]:
    """Velocity by regression, and the root mean square distance from it, of a track (T, 2)."""
    t = torch.arange(FRAMES) - (FRAMES - 1) / 2
    velocity = (t[:, None] * track).sum(0) / t.pow(2).sum()
    off = track - track.mean(0) - t[:, None] * velocity
    return velocity.tolist(), float(off.pow(2).sum(1).mean().sqrt())


@dataclass(frozen=True)
class _Fit:
    """A hypothesis about the objects, and where it fits a mask best. `place`: x, y and scale."""

    scene: Scene
    axis: tuple[float, float]
    place: torch.Tensor
    softness: float = 0.0
    error: float = math.inf

    def render(self, place: torch.Tensor, size: int) -> torch.Tensor:
        x, y, scale = place.tolist()
        cover = world.coverage(self.scene, (x, y), self.axis, scale, size)
        return _sharpen(blur(cover, self.softness))

    def error_at(self, place: torch.Tensor, soft: torch.Tensor) -> float:
        return float((soft - self.render(place, soft.shape[-1])).pow(2).sum())


def _best_object(soft: torch.Tensor, centre: tuple[float, float], words: dict[str, str | None]) -> tuple[float, Scene]:
    """The least squared error and its scene over every kind, size, count and standing axis."""
    mass = float(soft.sum((1, 2)).median()) / world.UNIT**2
    coarse = []
    for scene in sorted(_hypotheses(words), key=lambda s: abs(math.log(_mass(s) / max(mass, 1e-6))))[:PLAUSIBLE]:
        axes = {world.standing_axis(scene, h) for h in (True, False)} if scene.count == "two" else {(1.0, 0.0)}
        place = torch.tensor((centre[0], centre[1] - _shape(scene.object, scene.size)[1], 1.0))
        starts = (_Fit(scene, axis, place) for axis in sorted(axes))
        coarse += [replace(fit, error=fit.error_at(place, soft)) for fit in starts]
    coarse.sort(key=lambda fit: fit.error)
    best = min((_refined(fit, soft) for fit in coarse[:CANDIDATES]), key=lambda fit: fit.error)
    return best.error, best.scene


def _hypotheses(words: dict[str, str | None]) -> list[Scene]:
    known = {name: word for name, word in words.items() if word is not None}
    return [
        Scene(**(known | {"object": kind, "size": size, "count": count}))
        for kind in world.OBJECTS
        for size in world.SIZES
        for count in world.COUNTS
    ]


def _refined(fit: _Fit, soft: torch.Tensor) -> _Fit:
    """The fit after a few Gauss-Newton steps of place and scale, with the better of a hard and a soft edge."""
    for _ in range(STEPS):
        place = _stepped(fit, soft)
        error = fit.error_at(place, soft)
        if error >= fit.error:
            break
        fit = replace(fit, place=place, error=error)
    blurred = replace(fit, softness=SOFTNESS)
    return min(fit, replace(blurred, error=blurred.error_at(fit.place, soft)), key=lambda f: f.error)


def _stepped(fit: _Fit, soft: torch.Tensor) -> torch.Tensor:
    """One Gauss-Newton step of the place, with slopes from small displacements."""
    size = soft.shape[-1]
    small = torch.tensor((0.2 / world.UNIT, 0.2 / world.UNIT, 0.02))
    here = fit.render(fit.place, size)
    shifts = torch.diag(small)
    slopes = torch.stack([(fit.render(fit.place + d, size) - here).flatten() for d in shifts])  # (3, pixels)
    gram = slopes @ slopes.T + 1e-3 * torch.eye(3)
    step = torch.linalg.solve(gram, slopes @ (soft - here).flatten()).clamp(-5, 5) * small
    place = fit.place + step
    place[2].clamp_(*SCALES)
    return place


@lru_cache
def _shape(kind: str, size: str) -> tuple[float, float]:
    """The area of an object in square units, and how far below its centre its centre of mass lies."""
    x, y = (axis * world.UNIT / 256 for axis in world.pixel_centres(256))
    inside = world.signed_distance(kind, x - 0.5, y - 0.5, torch.tensor(world.SIZES[size])) < 0
    return float(inside.float().mean()), float(y[inside].mean()) - 0.5


def _mass(scene: Scene) -> float:
    """Area that a scene's objects cover, in square units."""
    return _shape(scene.object, scene.size)[0] * (1 + world.COUNTS.index(scene.count))


def blur(frames: torch.Tensor, sigma: float) -> torch.Tensor:
    """Gaussian blur of (..., H, W); sigma in pixels, 0 changes nothing."""
    if sigma == 0:
        return frames
    reach = max(1, math.ceil(2.5 * sigma))
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
    weights = weights / weights.sum()
    flat = frames.reshape(-1, 1, *frames.shape[-2:])
    flat = F.conv2d(F.pad(flat, (reach, reach, 0, 0), mode="replicate"), weights.view(1, 1, 1, -1))
    flat = F.conv2d(F.pad(flat, (0, 0, reach, reach), mode="replicate"), weights.view(1, 1, -1, 1))
    return flat.reshape(frames.shape)


# --- background and camera ---------------------------------------------------------------------------------------

# The texture's covariance over RGB, up to a factor: mostly grey light, some tint, and room for a model's own noise.
_NOISE = 0.81 * torch.ones(3, 3) + 0.3 * torch.eye(3)


@dataclass(frozen=True)
class _Film:
    camera: str
    pattern: torch.Tensor  # (T, H, W)
    fit: float
    agreement: float


def _background(v: torch.Tensor, free: torch.Tensor) -> str:
    mean = (v * free).sum((1, 2, 3)) / free.sum().clamp(min=1)
    return min(world.BACKGROUNDS, key=lambda name: math.dist(world.BACKGROUNDS[name], mean.tolist()))


def _signal(v: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The tone (T, H, W) of the background, about 1 + contrast * pattern: the RGB mix that hears least texture."""
    mix = torch.linalg.solve(_NOISE, base)
    return torch.einsum("c,cthw->thw", mix / (mix @ base), v)


def _quadrants(frames: torch.Tensor) -> torch.Tensor:
    """(..., H, W) -> (..., 4, HW / 4); quadrants in reading order."""
    *lead, h, w = frames.shape
    h, w = h // 2 * 2, w // 2 * 2
    cut = frames[..., :h, :w].reshape(*lead, 2, h // 2, 2, w // 2)
    return cut.transpose(-3, -2).reshape(*lead, 4, h * w // 4)


@lru_cache
def _waves(size: int) -> torch.Tensor:
    """(cameras, T, 4, pixels of a quadrant, 5): a constant and the four products of sine and cosine of x and y."""
    angle = torch.stack([world.world_points(c, size) for c in world.CAMERAS]) * (2 * math.pi / world.PATTERN_PERIOD)
    (sx, sy), (cx, cy) = angle.sin().unbind(-1), angle.cos().unbind(-1)
    waves = (torch.ones_like(sx), sx * sy, sx * cy, cx * sy, cx * cy)
    return torch.stack([_quadrants(w) for w in waves], -1)


def _film(signal: torch.Tensor, free: torch.Tensor) -> _Film:
    """The camera and the pattern's place that explain the background's tone best.

    A shifted product of two sines is a sum of four fixed products, so the place follows from a linear regression;
    the regression's sums over single quadrants and frames then tell whether all parts of the clip show one pattern.
    """
    waves, size = _waves(signal.shape[-1]), signal.shape[-1]
    weights = _quadrants(free)[None, ..., None]
    left = (waves * weights).transpose(-1, -2)
    gram, moment = left @ waves, left @ _quadrants(signal)[None, ..., None]
    best = None
    for i, camera in enumerate(world.CAMERAS):
        u, _, vh = torch.linalg.svd(_amplitudes(gram[i].sum((0, 1)), moment[i].sum((0, 1))))
        angle = torch.stack((torch.atan2(u[1, 0], u[0, 0]), torch.atan2(vh[0, 1], vh[0, 0])))
        place = world.pattern(world.world_points(camera, size), angle * (world.PATTERN_PERIOD / (2 * math.pi)))
        fit = _correlation(signal, place, free)
        if best is None or fit > best[0]:
            best = (fit, i, place)
    fit, i, place = best
    return _Film(world.CAMERAS[i], place, fit, _agreement(gram[i], moment[i]))


def _amplitudes(gram: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """(..., 2, 2) regression weights of the four waves from sums (..., 5, 5) and (..., 5, 1)."""
    ridge = (1e-3 * gram[..., :1, :1] + 1e-6) * torch.eye(5)
    return torch.linalg.solve(gram + ridge, moment)[..., 1:, 0].unflatten(-1, (2, 2))


def _agreement(gram: torch.Tensor, moment: torch.Tensor) -> float:
    """Least cosine between the patterns of left and right, top and bottom, and each frame and the others."""
    halves = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]], dtype=torch.float32)
    by_half = _amplitudes(*(torch.einsum("sq,tqij->sij", halves, x) for x in (gram, moment))).flatten(1)
    frames = torch.cat((torch.eye(FRAMES), 1 - torch.eye(FRAMES)))
    by_frame = _amplitudes(*(torch.einsum("st,tqij->sij", frames, x) for x in (gram, moment))).flatten(1)
    pairs = (by_half[0::2], by_half[1::2]), (by_frame[:FRAMES], by_frame[FRAMES:])
    return min(float(F.cosine_similarity(a, b, dim=-1).min()) for a, b in pairs)


def _correlation(a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor) -> float:
    """Weighted correlation of two fields."""
    total = weight.sum().clamp(min=1)
    a, b = a - (a * weight).sum() / total, b - (b * weight).sum() / total
    power = (a * a * weight).sum() * (b * b * weight).sum()
    return float((a * b * weight).sum() / power.clamp(min=1e-12).sqrt())


def _model(
    v: torch.Tensor, base: torch.Tensor, pattern: torch.Tensor, free: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """The textureless background (3, T, H, W), and the largest distance of any region from it."""
    model = base.view(3, 1, 1, 1) * (1 + world.PATTERN_CONTRAST * pattern)
    rest, weight = _quadrants((v - model) * free).sum(-1), _quadrants(free).sum(-1)
    tints = [rest.sum(-1) / weight.sum(-1).clamp(min=1)]
    halves = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]], dtype=torch.float32)
    tints.append((rest.sum(1) @ halves.T) / (weight.sum(0) @ halves.T).clamp(min=1))
    hue = torch.eye(3) - 0.2  # 0.6 of the grey part is texture's; the palette differs in hue
    return model, max(float((hue @ t).norm(dim=0).max()) for t in tints)


def _box(frames: torch.Tensor, side: int) -> torch.Tensor:
    return F.avg_pool2d(frames, side, 1, side // 2, count_include_pad=False)


def _local_mean(rest: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
    """Mean of `rest` (3, T, H, W) over the free pixels around; 0 far from any."""
    return _box(rest * free, NEARBY) / (_box(free[None], NEARBY) + 0.02)


def _stray(rest: torch.Tensor, free: torch.Tensor) -> float:
    """Share of the free pixels around which the mean residual is far outside what texture does."""
    inverse = torch.linalg.inv(_NOISE * 0.064**2)
    mean = _box(rest * free, 3) / _box(free[None], 3).clamp(min=0.1)
    far = torch.einsum("cthw,cd,dthw->thw", mean, inverse, mean) > STRAY_POWER
    return float((far * free).sum() / free.sum().clamp(min=1))


STRAY_POWER = 16.0  # squared distance in the texture's deviations, of a mean over 3 x 3 pixels


@lru_cache
def _step(camera: str, size: int) -> torch.Tensor:
    """Where frame t + 1 shows what every pixel of frame t shows: (T - 1, H, W, 2) in [-1, 1], for grid_sample."""
    points = world.world_points(camera, size)
    span = (points[:, -1, -1] - points[:, 0, 0]) * size / (size - 1)  # of the world that a frame sees
    origin = points[:, 0, 0] - span / (2 * size)
    share = (points[:-1] - origin[1:, None, None]) / span[1:, None, None]
    return share * 2 - 1


def _lead(v: torch.Tensor, free: torch.Tensor, camera: str) -> float:
    """By how much `camera` explains the worst step between two frames better than any other camera does."""
    size = v.shape[-1]
    # the pattern alone hardly tells a slow zoom from rest, the texture does
    around = _box(v * free, NEARBY) / _box(free[None], NEARBY).clamp(min=1e-3)
    frames = torch.cat(((v - around) * free, free[None])).transpose(0, 1)  # (T, 4, H, W)
    scores = {}
    for name in world.CAMERAS:
        ahead = F.grid_sample(frames[1:], _step(name, size), align_corners=False)
        weight = ahead[:, 3] * frames[:-1, 3]
        a, b = frames[:-1, :3].transpose(0, 1), ahead[:, :3].transpose(0, 1)
        power = (a * a * weight).sum((0, 2, 3)) * (b * b * weight).sum((0, 2, 3))
        scores[name] = (a * b * weight).sum((0, 2, 3)) / power.clamp(min=1e-12).sqrt()
    others = torch.stack([s for name, s in scores.items() if name != camera]).amax(0)
    return float((scores[camera] - others).min())
