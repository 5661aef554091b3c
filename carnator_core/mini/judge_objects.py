"""The judge's reading of objects: colour, kind, size, count and motion, by fitting the world's objects to a clip."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from . import world
from .judge_pixels import NOISE, blur
from .world import FRAMES, Scene

REACH = 0.17  # RGB distance within which a pixel counts as an object's; no background comes that close to a colour
GAINS = (0.88, 1.12)  # the layout's gain, with room for a clip that is a little too bright or too dark
LEAST_PIXELS = 4  # of an object's own colour in every frame
SOFTNESS = 0.6  # blur of an object's edge that a learned model may leave, in pixels
SCALES = (0.94, 1.06)  # the layout's change of size, with a little room
PLAUSIBLE = 7  # hypotheses, of 16, whose area is near enough to what is seen to be rendered
CANDIDATES = 2  # hypotheses that survive the coarse comparison
STEPS = 2  # Gauss-Newton steps for each of them


def colour_of(v: torch.Tensor) -> tuple[str | None, torch.Tensor]:
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


def alpha_of(v: torch.Tensor, back: torch.Tensor, support: torch.Tensor, colour: str) -> torch.Tensor:
    """How much of every pixel is object, (T, H, W) in [0, 1], sharpened by `_sharpen`."""
    pure = torch.tensor(world.COLOURS[colour])
    gains = torch.einsum("c,cthw->thw", pure, v)[support > 0] / pure.pow(2).sum()
    front = (pure * gains.median().clamp(*GAINS)).clamp(max=1).view(3, 1, 1, 1)
    way = front - back
    heard = torch.einsum("cd,dthw->cthw", torch.linalg.inv(NOISE), way)  # the projection that hears least texture
    return _sharpen(((v - back) * heard).sum(0) / (way * heard).sum(0).clamp(min=1e-3))


def _sharpen(alpha: torch.Tensor) -> torch.Tensor:
    """Coverage with the texture's noise around 0 and 1 cut off; done to what is seen and to what is compared."""
    return ((alpha - 0.2) / 0.6).clamp(0, 1)


def fit_objects(soft: torch.Tensor, near: torch.Tensor, words: dict[str, str | None]) -> dict[str, float]:
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
    """The least squared error and its scene over every kind, size and count."""
    mass = float(soft.sum((1, 2)).median()) / world.UNIT**2
    coarse = []
    for scene in sorted(_hypotheses(words), key=lambda s: abs(math.log(_mass(s) / max(mass, 1e-6))))[:PLAUSIBLE]:
        place = torch.tensor((centre[0], centre[1] - _shape(scene.object, scene.size)[1], 1.0))
        fit = _Fit(scene, world.standing_axis(scene), place)
        coarse.append(replace(fit, error=fit.error_at(place, soft)))
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
