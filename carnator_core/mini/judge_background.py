"""The judge's reading of the background: palette, pattern and camera, and whether all parts of a clip show one film."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from . import world
from .judge_pixels import NEARBY, NOISE, box
from .world import FRAMES

STRAY_POWER = 16.0  # squared distance in the texture's deviations, of a mean over 3 x 3 pixels


@dataclass(frozen=True)
class _Film:
    camera: str
    pattern: torch.Tensor  # (T, H, W)
    fit: float
    agreement: float


def background_of(v: torch.Tensor, free: torch.Tensor) -> str:
    mean = (v * free).sum((1, 2, 3)) / free.sum().clamp(min=1)
    return min(world.BACKGROUNDS, key=lambda name: math.dist(world.BACKGROUNDS[name], mean.tolist()))


def tone_of(v: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The tone (T, H, W) of the background, about 1 + contrast * pattern: the RGB mix that hears least texture."""
    mix = torch.linalg.solve(NOISE, base)
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


def film_of(signal: torch.Tensor, free: torch.Tensor) -> _Film:
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


def model_of(
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


def stray_of(rest: torch.Tensor, free: torch.Tensor) -> float:
    """Share of the free pixels around which the mean residual is far outside what texture does."""
    inverse = torch.linalg.inv(NOISE * 0.064**2)
    mean = box(rest * free, 3) / box(free[None], 3).clamp(min=0.1)
    far = torch.einsum("cthw,cd,dthw->thw", mean, inverse, mean) > STRAY_POWER
    return float((far * free).sum() / free.sum().clamp(min=1))


@lru_cache
def _step(camera: str, size: int) -> torch.Tensor:
    """Where frame t + 1 shows what every pixel of frame t shows: (T - 1, H, W, 2) in [-1, 1], for grid_sample."""
    points = world.world_points(camera, size)
    span = (points[:, -1, -1] - points[:, 0, 0]) * size / (size - 1)  # of the world that a frame sees
    origin = points[:, 0, 0] - span / (2 * size)
    share = (points[:-1] - origin[1:, None, None]) / span[1:, None, None]
    return share * 2 - 1


def lead_of(v: torch.Tensor, free: torch.Tensor, camera: str) -> float:
    """By how much `camera` explains the worst step between two frames better than any other camera does."""
    size = v.shape[-1]
    # the pattern alone hardly tells a slow zoom from rest, the texture does
    around = box(v * free, NEARBY) / box(free[None], NEARBY).clamp(min=1e-3)
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
