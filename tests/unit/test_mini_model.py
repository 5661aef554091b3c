from __future__ import annotations

import json

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import load_file

from carnator_core.mini import evaluate, keys, muon, sample, train
from carnator_core.mini import model as mini


@pytest.fixture(scope="module")
def model():
    return mini.load()


def test_the_weights_file_is_small_bfloat16_and_named_as_wan_released_it():
    assert mini.WEIGHTS.stat().st_size <= 12 * 2**20
    state = load_file(mini.WEIGHTS)
    assert {v.dtype for v in state.values()} == {torch.bfloat16}
    assert {"patch_embedding.weight", "head.modulation", "blocks.0.self_attn.norm_q.weight"} <= set(state)


def test_key_names_agree_with_diffusers_own_converter_by_equal_outputs(model):
    other = mini.build()
    other.load_state_dict(
        {k: v.float() for k, v in convert_wan_transformer_to_diffusers(load_file(mini.WEIGHTS)).items()}
    )
    x, t, text = torch.randn(1, 16, 5, 8, 8), torch.tensor([500.0]), torch.randn(1, 6, 4096)
    with torch.no_grad():
        assert torch.equal(model(x, t, text, return_dict=False)[0], other.eval()(x, t, text, return_dict=False)[0])


def test_key_names_round_trip_and_unknown_ones_are_refused(model):
    state = model.state_dict()
    assert set(keys.from_original(keys.to_original(state))) == set(state)
    with pytest.raises(KeyError, match="img_emb"):
        keys.from_original({"img_emb.proj.0.weight": torch.zeros(1)})


def test_missing_weights_name_the_command_that_makes_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="carnator_core.mini.train"):
        mini.load(tmp_path / "none.safetensors")


def test_larger_grids_run(model):
    with torch.no_grad():
        out = model(torch.randn(1, 16, 5, 48, 48), torch.tensor([900.0]), torch.zeros(1, 4, 4096), return_dict=False)[0]
    assert out.shape == (1, 16, 5, 48, 48) and out.isfinite().all()


def test_a_request_does_not_depend_on_its_batch(model):
    prompts = ["one small red ball moving left over the sea, steady camera", "two large white rings"]
    both = sample.sample(model, prompts, [1, 2], size=16, steps=3)
    alone = sample.sample(model, prompts[1:], [2], size=16, steps=3)
    torch.testing.assert_close(both[1:], alone, atol=1e-4, rtol=1e-4)


def test_orthogonalised_updates_have_singular_values_near_one():
    values = torch.linalg.svdvals(muon.orthogonalise(torch.randn(2, 40, 24)))
    assert values.min() > 0.5 and values.max() < 1.4


def test_resumed_training_continues_as_if_never_stopped(tmp_path):
    settings = train.Settings(steps=4, batch=2, rate=1e-3, large_from=0.5, decay=0.5, seed=3)

    def trainer(out):
        out.mkdir(exist_ok=True)
        return train.Trainer(settings, out, "cpu", compiled=False)

    whole = trainer(tmp_path / "whole")
    losses = [whole.train_step() for _ in range(4)]
    first = trainer(tmp_path / "parts")
    [first.train_step() for _ in range(2)]
    first.save()
    second = trainer(tmp_path / "parts")
    second.resume()
    assert [second.train_step() for _ in range(2)] == pytest.approx(losses[2:], rel=1e-5)


def test_a_checkpoint_is_no_pickle_and_a_missing_one_is_named(tmp_path):
    trainer = train.Trainer(train.Settings(2, 1, 1e-3, 1.0, 0.5, 0), tmp_path, "cpu", compiled=False)
    with pytest.raises(FileNotFoundError):
        trainer.resume()
    trainer.save()
    assert "average.patch_embedding.weight" in load_file(trainer.checkpoint)
    assert [p.suffix for p in tmp_path.iterdir()] == [".safetensors"] * 2


def test_objects_and_their_edges_weigh_more_where_little_noise_is_left():
    cover = torch.zeros(2, 5, 32, 32)
    cover[:, :, 8:12, 20:24] = 1
    weights = train.object_weights(cover, torch.tensor([0.0, 1.0]))
    assert weights.shape == (2, 1, 5, 16, 16)
    assert weights.mean().item() == pytest.approx(1, abs=1e-6)
    clear, noise = weights[:, 0, 0]
    assert clear[5, 11] == pytest.approx((1 + train.OBJECT_WEIGHT) * clear[0, 0].item())  # inside
    assert clear[3, 9] == clear[5, 11]  # the cell that holds the edge's outside
    assert clear[0, 0] == clear[15, 0] == noise[0, 0] == noise[5, 11]  # nothing is told apart in pure noise


def test_evaluate_prints_its_contract(capsys):
    assert evaluate.main(["--captions", "2", "--steps", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {
        "mean", "by_attribute", "best_guess", "unreadable", "fit_error", "unsafe_null",
        "headroom", "captions", "grid", "steps", "seed", "split", "dtype",
    }  # fmt: skip
    assert 0 <= result["mean"] <= 1 and result["captions"] == 2
