from __future__ import annotations

import random

import pytest
import torch

from carnator_core.mini import text, world
from carnator_core.signature.alignment import align


def words_at(prompt: str, rows: tuple[int, ...]) -> list[str]:
    pieces = [*text.pieces(prompt), text.END]
    return [pieces[i] for i in rows]


@pytest.mark.parametrize("attribute", [a for a in world.ATTRIBUTES if a != "count"])
def test_exactly_the_changed_word_is_found_in_the_embedded_encoders_space(attribute):
    rng = random.Random(attribute)
    for _ in range(20):
        scene = world.random_scene(rng)
        _, other = world.one_word_neighbour(scene, rng, attribute)
        phrasing = rng.randrange(len(world.PHRASINGS))
        one, two = world.caption(scene, phrasing), world.caption(other, phrasing)
        found = align(text.encode_one(one), text.encode_one(two))
        assert words_at(one, found.target) == [getattr(scene, attribute)]
        assert words_at(two, found.donor) == [getattr(other, attribute)]


def test_a_number_brings_its_plural():
    scene = world.Scene("ball", "red", "sea", "left", "small", "steady", "one")
    one, two = world.caption(scene), world.caption(scene.changed(count="two"))
    found = align(text.encode_one(one), text.encode_one(two))
    assert words_at(one, found.target) == ["one"]
    assert words_at(two, found.donor) == ["two", "s"]


def test_the_same_prompt_and_a_scaled_one_are_the_same():
    rows = text.encode_one("a red ball")
    assert align(rows, rows).same and align(rows, 3 * rows).same


def test_order_does_not_matter():
    rows = text.encode_one("one small red ball moving left over the sea")
    order = torch.randperm(len(rows))
    assert align(rows, rows[order]).same


def test_rows_of_another_encoder_are_refused():
    with pytest.raises(ValueError, match="cannot align"):
        align(torch.ones(3, 8), torch.ones(3, 16))


def test_a_changed_token_is_found_in_a_random_umt5s_space():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: UMT5 is not tested")
    config = transformers.UMT5Config(
        vocab_size=400, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, dropout_rate=0.0
    )
    torch.manual_seed(0)
    encoder = transformers.UMT5EncoderModel(config).eval()
    ids = torch.randint(2, 400, (1, 14))
    other = ids.clone()
    other[0, 5] = (ids[0, 5] + 7) % 400
    with torch.no_grad():
        a, b = (encoder(i).last_hidden_state[0] for i in (ids, other))
    found = align(a, b)
    assert found.target == (5,) and found.donor == (5,)
    assert (a - b).abs().amax(-1).min() > 0  # every row moved, only one counts as changed
