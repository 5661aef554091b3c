"""The world that the embedded model films: captioned moving objects, rendered exactly and anti-aliased.

A prompt decides seven attributes; everything else (texture at two scales, where the background pattern and the
objects lie, small changes of size and brightness) is decided by the clip's noise, as in real footage. All lengths
are in units of 32 pixels: a larger frame sees more of the same world at the same scale, as a wider lens does. (A model
that knows positions only relative to each other, as Wan's does, cannot tell how large the frame is; in a world that
grew with the frame it would learn two scales for one caption.)

Conventions: a clip is a tensor (B, 3, T, H, W) in [-1, 1]; x runs right, y runs down. Motion is told in picture
coordinates, the camera by what the background does: a steady camera leaves it, a panning one looks to the right
(the background flows left), a tilting one looks up (it flows down), a zooming one moves in (it grows).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F

from . import seeds

FRAMES = 5
UNIT = 32  # pixels that make one unit of length; the small frame is one unit wide
OBJECTS = ("ball", "ring", "cross", "triangle")
COLOURS = {
    "red": (0.90, 0.15, 0.15),
    "yellow": (0.95, 0.85, 0.15),
    "white": (0.95, 0.95, 0.95),
    "cyan": (0.20, 0.85, 0.90),
    "magenta": (0.90, 0.20, 0.80),
    "blue": (0.15, 0.25, 0.95),
}
BACKGROUNDS = {
    "forest": (0.18, 0.34, 0.18),
    "desert": (0.52, 0.42, 0.28),
    "sea": (0.13, 0.27, 0.38),
    "dusk": (0.35, 0.23, 0.38),
}
MOTIONS = {"left": (-0.1, 0.0), "right": (0.1, 0.0), "up": (0.0, -0.1), "down": (0.0, 0.1), "still": (0.0, 0.0)}
SIZES = {"small": 0.15, "large": 0.21}  # circumscribed radius; in a frame of one unit, a small cross covers 4.8 %
CAMERAS = ("steady", "panning", "tilting", "zooming")
COUNTS = ("one", "two")

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "object": OBJECTS,
    "colour": tuple(COLOURS),
    "background": tuple(BACKGROUNDS),
    "motion": tuple(MOTIONS),
    "size": tuple(SIZES),
    "camera": CAMERAS,
    "count": COUNTS,
}

PAN_SPEED = 0.09  # how far the background moves between two frames
ZOOM_SPEED = 1.09  # factor by which the background grows between two frames
SPREAD = 0.24  # half the distance between two objects, across their motion
JITTER = 0.045  # how far from the middle a track may lie
PATTERN_PERIOD = 25 / 32  # 6.25 tokens, about the shortest wavelength (2 pi) of rotary embeddings
PATTERN_CONTRAST = 0.6
COARSE_TEXTURE = (1 / 6, 0.04)  # cell, standard deviation
FINE_TEXTURE = (0.1, 0.05)


@dataclass(frozen=True)
class Scene:
    """What a prompt decides. Every field holds one of the words of `ATTRIBUTES`."""

    object: str
    colour: str
    background: str
    motion: str
    size: str
    camera: str
    count: str

    def __post_init__(self) -> None:
        for name, words in ATTRIBUTES.items():
            if getattr(self, name) not in words:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown; choose one of {', '.join(words)}")

    @property
    def key(self) -> str:
        return "/".join(asdict(self).values())

    @property
    def split(self) -> str:
        return seeds.split_of_key(self.key)

    def changed(self, **attributes: str) -> Scene:
        return replace(self, **attributes)


def random_scene(rng: random.Random, split: str | None = None) -> Scene:
    """A uniformly drawn scene, of the given split ("fit", "calibrate", "proof") or of any."""
    while True:
        scene = Scene(**{name: rng.choice(words) for name, words in ATTRIBUTES.items()})
        if split is None or scene.split == split:
            return scene


def one_word_neighbour(scene: Scene, rng: random.Random, attribute: str | None = None) -> tuple[str, Scene]:
    """A scene that differs in exactly one attribute, and that attribute's name."""
    attribute = attribute or rng.choice(list(ATTRIBUTES))
    others = [word for word in ATTRIBUTES[attribute] if word != getattr(scene, attribute)]
    return attribute, scene.changed(**{attribute: rng.choice(others)})


PHRASINGS = (
    "{count} {size} {colour} {object} moving {motion} over the {background}, {camera} camera",
    "{camera} camera, the {background}, {count} {size} {colour} {object} going {motion}",
    "a video of {count} {colour} {object}, {size}, heading {motion} in front of the {background}, {camera} shot",
)


def caption(scene: Scene, phrasing: int = 0) -> str:
    """The prompt for a scene in one of `PHRASINGS`."""
    words = asdict(scene)
    if scene.count == "two":
        words["object"] = {"cross": "crosses"}.get(scene.object, scene.object + "s")
    return PHRASINGS[phrasing].format(**words)


def parse(prompt: str) -> Scene | None:
    """The scene that a prompt asks for, read by its words; None when it does not name one word of every attribute."""
    words = {w.strip(",.").lower() for w in prompt.split()}
    singular = {("cross" if w == "crosses" else w[:-1] if w.endswith("s") and w[:-1] in OBJECTS else w) for w in words}
    found = {name: [w for w in options if w in singular] for name, options in ATTRIBUTES.items()}
    if any(len(options) != 1 for options in found.values()):
        return None
    return Scene(**{name: options[0] for name, options in found.items()})


# --- rendering ---------------------------------------------------------------------------------------------------


def signed_distance(kind: str, x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Signed distance (negative inside) of the points (x, y) to an object at the origin."""
    if kind == "ball":
        return torch.hypot(x, y) - radius
    if kind == "ring":
        return (torch.hypot(x, y) - 0.72 * radius).abs() - 0.28 * radius
    if kind == "cross":
        ax, ay, arm = x.abs(), y.abs(), 0.32 * radius
        return torch.minimum(torch.maximum(ax - radius, ay - arm), torch.maximum(ax - arm, ay - radius))
    if kind == "triangle":  # equilateral, a tip at the top
        y = y - 0.2 * radius  # optical centre
        half = 0.6 * radius
        return torch.maximum(y - half, math.sqrt(0.75) * x.abs() - 0.5 * y - half)
    raise ValueError(f"unknown object {kind!r}")


def pixel_centres(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y of every pixel's centre, each (size, size), from the frame's upper left corner."""
    axis = (torch.arange(size) + 0.5) / UNIT
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return x, y


def object_centres(
    scene: Scene, middle: tuple[float, float], axis: tuple[float, float]
) -> list[list[tuple[float, float]]]:
    """Centres of every object in every frame; `axis` is the unit vector along which two objects stand."""
    vx, vy = MOTIONS[scene.motion]
    offsets = (-SPREAD, SPREAD) if scene.count == "two" else (0.0,)
    return [
        [
            (
                middle[0] + o * axis[0] + vx * (t - (FRAMES - 1) / 2),
                middle[1] + o * axis[1] + vy * (t - (FRAMES - 1) / 2),
            )
            for t in range(FRAMES)
        ]
        for o in offsets
    ]


def coverage(
    scene: Scene, middle: tuple[float, float], axis: tuple[float, float], scale: float, size: int
) -> torch.Tensor:
    """Share of every pixel that the objects cover, (T, H, W) in [0, 1]."""
    x, y = pixel_centres(size)
    radius = torch.tensor(SIZES[scene.size] * scale)
    out = torch.zeros(FRAMES, size, size)
    for track in object_centres(scene, middle, axis):
        for t, (cx, cy) in enumerate(track):
            edge = signed_distance(scene.object, x - cx, y - cy, radius) * UNIT
            out[t] = torch.maximum(out[t], (0.5 - edge).clamp(0, 1))
    return out


def standing_axis(scene: Scene) -> tuple[float, float]:
    """Along which axis two objects stand: across their motion; resting ones stand side by side."""
    return (0.0, 1.0) if scene.motion in ("left", "right") else (1.0, 0.0)


def world_points(camera: str, size: int) -> torch.Tensor:
    """World coordinates (T, H, W, 2) that every pixel looks at."""
    x, y = pixel_centres(size)
    middle = size / UNIT / 2
    points = []
    for t in range(FRAMES):
        if camera == "panning":
            points.append(torch.stack((x + PAN_SPEED * t, y), -1))
        elif camera == "tilting":
            points.append(torch.stack((x, y - PAN_SPEED * t), -1))
        elif camera == "zooming":
            points.append(torch.stack([(axis - middle) / ZOOM_SPEED**t + middle for axis in (x, y)], -1))
        else:
            points.append(torch.stack((x, y), -1))
    return torch.stack(points)


def pattern(points: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
    """The two-tone pattern, fixed in the world: points (..., 2), phase (..., 2) -> (...) in [-1, 1]."""
    waves = torch.sin(2 * math.pi * (points + phase) / PATTERN_PERIOD)
    return torch.tanh(2.5 * waves[..., 0] * waves[..., 1])


def _texture(points: torch.Tensor, cell: float, channels: int, generator: torch.Generator) -> torch.Tensor:
    """Smooth random field (channels, T, H, W) of unit deviation over the frame and half a unit around it."""
    t, h, w, _ = points.shape
    reach = (h / UNIT + 1) / 2
    cells = max(4, round(2 * reach / cell))
    field = torch.randn(1, channels, cells, cells, generator=generator)
    grid = ((points - h / UNIT / 2) / reach).reshape(1, t * h, w, 2)
    values = F.grid_sample(field, grid, mode="bicubic", padding_mode="reflection", align_corners=False)
    return values.reshape(channels, t, h, w) * 1.25  # interpolation shrinks the deviation to about 0.8


@dataclass(frozen=True)
class Layout:
    """What the noise decides about where things lie."""

    middle: tuple[float, float]
    axis: tuple[float, float]
    scale: float
    gain: float
    phase: tuple[float, float]


def random_layout(
    scene: Scene, size: int, generator: torch.Generator, phase: tuple[float, float] | None = None
) -> Layout:
    """A drawn layout, with the given phase of the pattern or a drawn one."""
    u = torch.rand(6, generator=generator).tolist()
    middle = size / UNIT / 2
    return Layout(
        middle=(middle + JITTER * (2 * u[0] - 1), middle + JITTER * (2 * u[1] - 1)),
        axis=standing_axis(scene),
        scale=0.96 + 0.08 * u[2],
        gain=0.94 + 0.12 * u[3],
        phase=phase or (PATTERN_PERIOD * u[4], PATTERN_PERIOD * u[5]),
    )


def render_one(
    scene: Scene, size: int, generator: torch.Generator, phase: tuple[float, float] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One clip (3, T, size, size) in [-1, 1] and the objects' coverage (T, size, size)."""
    layout = random_layout(scene, size, generator, phase)
    points = world_points(scene.camera, size)
    tone = 1 + PATTERN_CONTRAST * pattern(points, torch.tensor(layout.phase))
    base = torch.tensor(BACKGROUNDS[scene.background]).view(3, 1, 1, 1)
    detail = 0.0
    for cell, deviation in (COARSE_TEXTURE, FINE_TEXTURE):
        light = _texture(points, cell, 1, generator)
        tint = _texture(points, cell, 3, generator)
        detail = detail + deviation * (0.9 * light + 0.43 * tint)
    back = base * tone + detail
    cover = coverage(scene, layout.middle, layout.axis, layout.scale, size)
    front = torch.tensor(COLOURS[scene.colour]).view(3, 1, 1, 1) * layout.gain
    clip = (back * (1 - cover) + front * cover).clamp(0, 1)
    return clip * 2 - 1, cover


def render_with_cover(
    scenes: Sequence[Scene], seed: int, size: int = UNIT, phases: Sequence[tuple[float, float]] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clips (B, 3, T, size, size) in [-1, 1] and the objects' coverage (B, T, size, size) in [0, 1].

    Clip i depends on (scene i, seed + i) only, and on `phases[i]` where the patterns' phases are given.
    """
    made = [
        render_one(scene, size, torch.Generator().manual_seed(seed + i), phases and phases[i])
        for i, scene in enumerate(scenes)
    ]
    return torch.stack([clip for clip, _ in made]), torch.stack([cover for _, cover in made])


def render(scenes: Sequence[Scene], seed: int, size: int = UNIT) -> torch.Tensor:
    """The clips of `render_with_cover` alone."""
    return render_with_cover(scenes, seed, size)[0]
