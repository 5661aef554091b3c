"""The place of the pattern that a noise resembles: exact, a law under shifts, and blind to what it must not see."""

from __future__ import annotations

import math
import random

import pytest
import torch

from carnator_core.mini import codec, coupling, sample, train, world

PERIOD = world.PATTERN_PERIOD


def overlap(noise: torch.Tensor, camera: str, phase: tuple[float, float]) -> float:
    """How much the pattern, smooth as the coupling sees it, resembles a noise, computed pixel by pixel."""
    grey = codec.decode(noise[None])[0].sum(0)
    waves = torch.sin(2 * math.pi * (world.world_points(camera, grey.shape[-1]) + torch.tensor(phase)) / PERIOD)
    return float((waves.prod(-1) * grey).sum())


def apart(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Distance of two phases; half a period along both axes is the same pattern."""
    distances = []
    for shift in (0.0, PERIOD / 2):
        steps = [(x - y + shift + PERIOD / 2) % PERIOD - PERIOD / 2 for x, y in zip(a, b, strict=True)]
        distances.append(math.hypot(*steps))
    return min(distances)


@pytest.mark.parametrize("camera", world.CAMERAS)
@pytest.mark.parametrize("size", (32, 64))
def test_no_place_resembles_the_noise_more(camera, size):
    noise = sample.noise([11], size)[0]
    found = overlap(noise, camera, coupling.phase_of(noise, camera))
    others = [overlap(noise, camera, (PERIOD * i / 16, PERIOD * j / 16)) for i in range(16) for j in range(16)]
    assert found >= max(others) > 0


@pytest.mark.parametrize("camera", ("steady", "panning", "tilting"))
def test_a_noise_moved_by_one_position_moves_the_pattern_by_as_much(camera):
    noise = sample.noise([12], 32)[0]
    noise[..., -1:], noise[..., -1:, :] = 0, 0  # nothing leaves the frame
    x, y = coupling.phase_of(noise, camera)
    step = codec.BLOCK / world.UNIT  # a latent position, in units of the world
    right = coupling.phase_of(noise.roll(1, -1), camera)
    assert apart(right, (x - step, y)) < 1e-4
    assert apart(right, (x, y)) > step / 2
    assert apart(coupling.phase_of(noise.roll(1, -2), camera), (x, y - step)) < 1e-4


@pytest.mark.parametrize("camera", world.CAMERAS)
def test_a_pattern_buried_in_noise_is_found_where_it_was_put(camera):
    scene = world.Scene("ball", "red", "desert", "left", "small", camera, "one")
    phase = (0.11, 0.37)
    clip, _ = world.render_with_cover([scene], 5, phases=[phase])
    noisy = codec.encode(clip) + 0.5 * sample.noise([13], 32)
    assert apart(coupling.phase_of(noisy[0], camera), phase) < 0.03


def test_training_takes_the_noise_as_it_was_drawn_and_the_pattern_from_it():
    settings = train.Settings(steps=10, batch=6, rate=1e-3, large_from=0.0, decay=0.5, seed=3)
    clean, noise, sigma, _, weights = train.batch_at(4, settings)
    seed = train.FIT.start + 3 * 7919 + 4 * 64
    drawn = torch.randn(noise.shape, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(noise, drawn)
    assert clean.shape == noise.shape and weights.shape[0] == len(sigma) == 6
    assert 0 <= sigma.min() and sigma.max() < 1
    rng = random.Random(seed)
    scenes = [world.random_scene(rng, "fit") for _ in range(6)]
    for scene, n, c in zip(scenes, noise, clean, strict=True):
        assert apart(coupling.phase_of(c, scene.camera), coupling.phase_of(n, scene.camera)) < 0.12
