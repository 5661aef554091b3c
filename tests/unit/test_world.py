"""The filmed world, its codec and its text encoder keep the promises that the rest is built on."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carnator_core.mini import codec, seeds, text, world
from carnator_core.mini.world import ATTRIBUTES, Scene

ALL = [Scene(*words) for words in itertools.product(*ATTRIBUTES.values())]
SCENE = Scene("ball", "red", "sea", "left", "small", "panning", "one")
any_scene = st.sampled_from(ALL)
repeatable = settings(suppress_health_check=[HealthCheck.too_slow])


# --- captions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phrasing", range(len(world.PHRASINGS)))
def test_every_caption_tells_its_scene(phrasing):
    for scene in ALL:
        assert world.parse(world.caption(scene, phrasing)) == scene


@repeatable
@given(any_scene, st.integers(0, len(world.PHRASINGS) - 1))
def test_reading_a_prompt_ignores_case_and_closing_marks(scene, phrasing):
    assert world.parse(world.caption(scene, phrasing).upper() + ".") == scene


@repeatable
@given(any_scene, st.sampled_from(sorted(ATTRIBUTES)))
def test_a_prompt_without_one_of_the_words_asks_for_no_scene(scene, attribute):
    words = world.caption(scene).replace(",", "").split()
    kept = [w for w in words if not w.startswith(getattr(scene, attribute))]
    assert world.parse(" ".join(kept)) is None


def test_a_prompt_with_two_colours_asks_for_no_scene():
    assert world.parse(world.caption(SCENE) + " blue") is None
    assert world.parse("") is None


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_a_word_that_is_unknown_is_refused_by_name(attribute):
    with pytest.raises(ValueError, match=attribute):
        SCENE.changed(**{attribute: "nothing"})


@repeatable
@given(any_scene, st.integers(0, 2**32), st.sampled_from([None, *ATTRIBUTES]))
def test_a_neighbour_differs_in_exactly_one_attribute(scene, seed, wanted):
    name, other = world.one_word_neighbour(scene, random.Random(seed), wanted)
    assert [n for n in ATTRIBUTES if getattr(scene, n) != getattr(other, n)] == [name]
    assert wanted in (None, name)


# --- splits ------------------------------------------------------------------------------------------------------


def test_a_tenth_of_all_scenes_is_kept_for_proof_and_one_for_calibration():
    shares = {name: sum(s.split == name for s in ALL) / len(ALL) for name in seeds.RANGES}
    assert len({s.key for s in ALL}) == len(ALL)
    assert sum(shares.values()) == 1
    assert 0.08 < shares["proof"] < 0.12
    assert 0.08 < shares["calibrate"] < 0.12


@pytest.mark.parametrize("split", seeds.RANGES)
def test_scenes_are_drawn_from_the_split_asked_for_and_know_every_word(split):
    rng = random.Random(0)
    drawn = [world.random_scene(rng, split) for _ in range(200)]
    assert {s.split for s in drawn} == {split}
    for name, words in ATTRIBUTES.items():
        assert {getattr(s, name) for s in drawn} == set(words)


# --- rendering ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [32, 64])
def test_rendering_is_deterministic_and_in_range(size):
    scenes = [SCENE, SCENE.changed(camera="zooming", count="two")]
    clips = world.render(scenes, 5, size)
    assert clips.shape == (2, 3, world.FRAMES, size, size)
    assert clips.min() >= -1 and clips.max() <= 1
    torch.manual_seed(99)  # the global generator must play no part
    assert torch.equal(clips, world.render(scenes, 5, size))


def test_a_clip_depends_on_its_scene_and_its_seed_only():
    others = [SCENE.changed(object="ring"), SCENE.changed(camera="tilting"), SCENE]
    clips = world.render(others, 40)
    for i, scene in enumerate(others):
        assert torch.equal(clips[i], world.render([scene], 40 + i)[0])
    assert not torch.equal(clips[2], world.render([SCENE], 43)[0])


def _cover(scene: Scene, seed: int, size: int = 32) -> torch.Tensor:
    return world.render_one(scene, size, torch.Generator().manual_seed(seed))[1]


@pytest.mark.parametrize("kind", world.OBJECTS)
def test_small_objects_are_small_and_large_ones_are_clearly_larger(kind):
    share = {size: _cover(SCENE.changed(object=kind, size=size), 3).mean() for size in world.SIZES}
    assert 0.03 < share["small"] < 0.08
    assert share["small"] < 0.05 or kind in ("ball", "ring")  # some are under a twentieth of a frame
    assert share["large"] > 1.5 * share["small"]


@pytest.mark.parametrize("kind", world.OBJECTS)
@pytest.mark.parametrize("count", world.COUNTS)
def test_a_larger_frame_is_a_wider_view_of_a_world_at_the_same_scale(kind, count):
    """Objects cover as many pixels, and the background's pattern has the same period in pixels."""
    scene = SCENE.changed(object=kind, count=count, size="large")
    narrow, wide = (_cover(scene, 4, size) for size in (32, 64))
    assert (narrow.sum((1, 2)) - wide.sum((1, 2))).abs().max() < 0.02 * narrow.sum((1, 2)).max()
    step = round(world.PATTERN_PERIOD * world.UNIT)
    points = world.world_points("steady", 64)
    tone = world.pattern(points, torch.tensor((0.1, 0.3)))
    assert (tone[..., step:] - tone[..., :-step]).abs().max() < 1e-4
    assert tone[..., : step // 2].std() > 0.3


@pytest.mark.parametrize("motion", world.MOTIONS)
@pytest.mark.parametrize("count", world.COUNTS)
def test_objects_move_where_the_word_says_at_three_pixels_a_frame_or_more(motion, count):
    x, y = (32 * axis for axis in world.pixel_centres(32))
    for seed in range(5):
        cover = _cover(SCENE.changed(motion=motion, count=count, object="cross", size="large"), seed)
        mass = cover.sum((1, 2))
        track = torch.stack(((cover * x).sum((1, 2)) / mass, (cover * y).sum((1, 2)) / mass), -1)
        steps = track.diff(dim=0)
        expected = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}[motion]
        if motion == "still":
            assert steps.norm(dim=-1).max() < 0.05
        else:
            assert (steps @ torch.tensor(expected, dtype=torch.float32)).min() >= 3
            assert mass.std() < 0.05 * mass.mean()  # no object leaves the frame


@pytest.mark.parametrize(
    ("camera", "flow"), [("steady", (0, 0)), ("panning", (-1, 0)), ("tilting", (0, 1)), ("zooming", None)]
)
def test_the_background_flows_as_the_camera_word_says(camera, flow):
    """A point of the world is found again, displaced by the flow; a zoom moves it away from the middle."""
    size = 64
    points = world.world_points(camera, size)
    step = world.PAN_SPEED * world.UNIT
    for x, y in ((20, 40), (44, 24)):
        distance = (points[1] - points[0, y, x]).norm(dim=-1)
        found_y, found_x = divmod(int(distance.argmin()), size)
        if flow is not None:
            assert abs(found_x - x - flow[0] * step) <= 0.5
            assert abs(found_y - y - flow[1] * step) <= 0.5
        else:
            assert abs(found_x - 31.5) > abs(x - 31.5)
            assert abs(found_y - 31.5) > abs(y - 31.5)


def test_an_unknown_object_cannot_be_drawn():
    with pytest.raises(ValueError, match="cube"):
        world.signed_distance("cube", torch.zeros(1), torch.zeros(1), torch.tensor(0.1))


# --- codec -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [32, 64])
def test_the_codec_gives_a_clip_back(size):
    clips = world.render([SCENE, SCENE.changed(background="desert")], 3, size)
    latent = codec.encode(clips)
    assert latent.shape == (2, codec.CHANNELS, world.FRAMES, size // 2, size // 2)
    assert (codec.decode(latent) - clips).abs().max() < 1e-5


def test_latents_have_about_unit_deviation_and_decode_in_range():
    latent = codec.encode(world.render(ALL[::900], 0))
    assert 0.7 < latent.std() < 1.4
    assert codec.decode(10 * latent).abs().max() <= 1


# --- text encoder ------------------------------------------------------------------------------------------------


def test_embeddings_have_the_shape_of_a_padded_t5_and_end_in_zeros():
    prompts = [world.caption(SCENE), ""]
    rows = text.encode(prompts)
    assert rows.shape == (2, text.LENGTH, text.WIDTH) == (2, 32, 4096)
    for row, prompt in zip(rows, prompts, strict=True):
        used = len(text.pieces(prompt)) + 1  # the end token
        assert (row[:used].norm(dim=-1) > 0).all()
        assert not row[used:].any()


@pytest.mark.parametrize("phrasing", range(len(world.PHRASINGS)))
def test_no_caption_is_cut_off(phrasing):
    longest = max(len(text.pieces(world.caption(s, phrasing))) for s in ALL[::7])
    assert longest < text.LENGTH


def test_a_prompt_that_is_too_long_is_cut_and_keeps_its_end_token():
    rows = text.encode([" ".join(f"word{i}" for i in range(100))])
    assert (rows[0].norm(dim=-1) > 0).all()


def _likeness(scene: Scene, other: Scene, phrasing: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine of every row of two captions of equal length, for the words that stay and for those that change."""
    before, after = (text.pieces(world.caption(s, phrasing)) for s in (scene, other))
    a, b = (text.encode_one(world.caption(s, phrasing)) for s in (scene, other))
    assert (a - b).abs().amax(-1).min() > 0  # every row moves
    same = torch.tensor([p == q for p, q in zip(before, after, strict=True)] + [True])
    cosine = F.cosine_similarity(a, b, dim=-1)
    return cosine[same], cosine[~same]


@pytest.mark.parametrize("attribute", [name for name in ATTRIBUTES if name != "count"])
def test_one_changed_word_moves_every_row_a_little(attribute):
    """A row whose attention falls on the changed word moves further than the others, but stays the nearer to itself."""
    rng = random.Random(attribute)
    stay = []
    for i in range(30):
        scene = world.random_scene(rng).changed(count="one")  # a plural would shift the words behind it
        same, changed = _likeness(scene, world.one_word_neighbour(scene, rng, attribute)[1], i % len(world.PHRASINGS))
        assert same.mean() > 0.9
        assert changed.max() < 0.5 < same.min()
        stay.append(same)
    assert (torch.cat(stay) > 0.9).float().mean() > 0.9


def test_the_encoder_is_deterministic():
    prompt = world.caption(SCENE, 2)
    first = text.encode([prompt])
    text._signs.cache_clear()
    torch.manual_seed(1)
    assert torch.equal(first, text.encode([prompt]))
