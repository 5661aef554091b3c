from __future__ import annotations

import json
import math

import pytest
import torch

from carnator_core.mini import distill, evaluate, few_step, lora, sample, world
from carnator_core.mini import model as mini


def settings(**changes) -> distill.Settings:
    plain = dict(
        steps=16, batch=2, rate=2e-3, large_from=1.0, decay=0.5, seed=3,
        rank=4, own_from=0.5, substeps=2, rollouts=1, epochs=2,
    )  # fmt: skip
    return distill.Settings(**{**plain, **changes})


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Weights of a tiny model whose answers depend on the prompt and on sigma."""
    path = tmp_path_factory.mktemp("teacher") / "weights.safetensors"
    torch.manual_seed(0)
    model = mini.build(num_attention_heads=1, num_layers=1, ffn_dim=64)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1 and "scale_shift" not in name:
                p.mul_(2)
    mini.save(model, path, {})
    return path


def distiller(teacher, out, **changes) -> distill.Distiller:
    out.mkdir(exist_ok=True)
    return distill.Distiller(settings(**changes), teacher, out, "cpu", compiled=False)


@pytest.fixture(scope="module")
def uninterrupted(teacher, tmp_path_factory):
    run = distiller(teacher, tmp_path_factory.mktemp("whole"))
    [run.train_step() for _ in range(16)]
    return run.lora.tensors()


@pytest.mark.parametrize("stop", [3, 8, 13])  # within a chunk, between two, within one of the student's own
def test_an_interrupted_run_ends_as_one_that_never_stopped(teacher, uninterrupted, tmp_path, stop):
    first = distiller(teacher, tmp_path)
    [first.train_step() for _ in range(stop)]
    first.save()
    second = distiller(teacher, tmp_path)
    second.resume()
    assert second.step == stop
    [second.train_step() for _ in range(16 - stop)]
    for name, factor in second.lora.tensors().items():
        torch.testing.assert_close(factor, uninterrupted[name], rtol=1e-5, atol=1e-7)


def test_resuming_nothing_says_so(teacher, tmp_path):
    with pytest.raises(FileNotFoundError):
        distiller(teacher, tmp_path).resume()


def test_a_companion_may_start_from_another_one_s_factors(teacher, tmp_path):
    earlier = distiller(teacher, tmp_path / "earlier")
    [earlier.train_step() for _ in range(4)]
    earlier.save()
    later = distiller(teacher, tmp_path / "later", own_from=0.0)
    later.start_from(earlier.result)
    for name, factor in later.lora.tensors().items():
        torch.testing.assert_close(factor, earlier.lora.tensors()[name], rtol=1e-2, atol=1e-3)  # kept in bfloat16
    assert math.isfinite(later.train_step())
    with pytest.raises(ValueError, match="--rank"):
        distiller(teacher, tmp_path / "other", rank=2).start_from(earlier.result)


def test_the_student_comes_nearer_to_the_guided_teacher_than_the_plain_model_at_equal_forwards(teacher, tmp_path):
    out = tmp_path / "run"
    arguments = ["--out", str(out), "--teacher", str(teacher), "--steps", "64", "--batch", "4", "--rank", "8",
                 "--substeps", "3", "--epochs", "2", "--rollouts", "2", "--large-from", "1", "--rate", "5e-3",
                 "--sheet-every", "1000"]  # fmt: skip
    assert distill.main(arguments) == 0
    found = distill.compare(teacher, out / few_step.LORA.name, 8, "small", steps=12)
    assert found["student"] > found["plain, guidance 1"] + 2, found  # at equal forwards
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 64 and rows[-1]["loss"] < rows[0]["loss"]
    assert (out / "sheet_000064.png").is_file()


def test_the_first_part_walks_the_teachers_way_and_the_second_the_students_own(teacher, tmp_path):
    run = distiller(teacher, tmp_path)
    for _, up in run.lora.pairs.values():
        up.data.normal_(std=0.05)
    levels = torch.tensor(run.levels)
    for step, own in ((0, False), (8, True)):
        run.step = step
        run.refill()
        chunk = run.rollouts
        states, velocities = (t.view(4, 2, *t.shape[1:]) for t in (chunk.states, chunk.velocities))
        for k in range(3):
            with torch.no_grad():
                students = run.student(states[k], levels[k].expand(2), chunk.embeddings)
            width = levels[k + 1] - levels[k]
            taken, left = (students, velocities[k]) if own else (velocities[k], students)
            torch.testing.assert_close(states[k + 1], states[k] + width * taken, atol=1e-3, rtol=1e-3)
            assert (states[k + 1] - states[k] - width * left).abs().max() > 1e-2


def test_every_epoch_takes_every_row_of_a_chunk_once(teacher, tmp_path):
    run = distiller(teacher, tmp_path, rollouts=2)
    run.refill()
    seen = []
    for step in range(16):
        run.step = step
        seen.append(run.rows())
    epochs = [torch.cat(seen[:8]), torch.cat(seen[8:])]
    assert all(sorted(e.tolist()) == list(range(16)) for e in epochs)
    assert not torch.equal(*epochs)


def test_the_teacher_is_followed_to_second_order():
    def model(x, timestep, cond, return_dict):  # dx / dsigma = x
        return (x,)

    x, nothing = torch.ones(1, 16, 1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 1)
    exact = math.exp(-1)

    def error(steps: int) -> float:
        levels = sample.sigmas(steps).tolist()
        return (distill.follow(model, x, levels, nothing, nothing, 1.0) - exact).abs().max().item()

    assert error(64) < 1e-3
    assert 3.2 < error(32) / error(64) < 4.8


def test_chunks_ask_for_captions_of_the_fit_split_only_and_never_share_a_noise():
    s = settings(batch=8, rollouts=2, steps=160, large_from=0.5)
    seeds, grids = [], []
    for chunk in range(10):
        prompts, noises, size = distill.requests_of(chunk, s)
        assert {world.parse(p).split for p in prompts} == {"fit"}
        seeds.extend(noises)
        grids.append((size, len(noises)))
    assert len(seeds) == len(set(seeds)) and max(seeds) < 1_000_000
    assert grids == [(64, 4) if c == 7 else (32, 16) for c in range(10)]


def test_both_grids_train(teacher, tmp_path):
    run = distiller(teacher, tmp_path, large_from=0.0, batch=4, epochs=1)
    run.step = 3 * run.settings.chunk_steps
    assert math.isfinite(run.train_step())
    assert run.rollouts.states.shape[-1] == 32


def test_a_missing_lora_names_the_command_that_makes_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="carnator_core.mini.distill"):
        few_step.load(companion=tmp_path / "none.safetensors")
    with pytest.raises(FileNotFoundError, match="carnator_core.mini.distill"):
        evaluate.main(["--few-step", "--lora", str(tmp_path / "none.safetensors")])


def test_a_lora_of_other_weights_is_refused(teacher, tmp_path):
    run = distiller(teacher, tmp_path)
    run.save()
    few_step.load(teacher, run.result)
    torch.manual_seed(5)
    mini.save(mini.build(num_attention_heads=1, num_layers=1, ffn_dim=64), tmp_path / "other.safetensors", {})
    with pytest.raises(ValueError, match="carnator_core.mini.distill"):
        few_step.load(tmp_path / "other.safetensors", run.result)


def test_evaluate_takes_the_few_step_companion(teacher, tmp_path, capsys):
    run = distiller(teacher, tmp_path)
    run.save()
    files = ["--weights", str(teacher), "--lora", str(run.result)]
    assert evaluate.main(["--few-step", "--captions", "2", "--json", *files]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 4 and result["unsafe_null"] is None and result["headroom"] is None


def test_the_shipped_lora_is_small_and_made_for_the_shipped_weights():
    assert few_step.LORA.stat().st_size <= 2_000_000
    few_step.load()
    assert all(f.isfinite().all() for f in lora.load(few_step.LORA).parameters())
