"""`bench quality` and `bench speed`: one plan, its quality and its time, from the command line."""

from __future__ import annotations

import json

import pytest

from carnator_core.__main__ import main
from carnator_core.evaluation.quality import Way
from carnator_core.evaluation.speed import latent_of, plan_of, region_of
from carnator_core.grid import TokenGrid
from carnator_core.reuse.scope import scope_of

WAYS = ("answer", "alone", "pooled", "remembered")
QUALITY = ["bench", "quality", "--grid", "small", "--pairs", "2", "--steps", "6", "--split", "fit"]


def test_plans_by_name():
    assert Way.named("policy", 20) == Way(None, None) and Way.named("policy-s90", 20).kept == 0.9
    assert Way.named("policy-r1", 20).refresh == 1
    assert Way.named("even-5", 20).plan.forwards == 2 + 5 + 1
    assert str(Way.named("paced-1", 20).plan).startswith("##.#.#")
    assert str(Way.named("paced-1-r3", 20).plan).startswith("##.#.o.o.#")
    assert str(Way.named("resume-9", 20).plan) == "##......." + "#" * 11
    assert str(Way.named("drsd", 4).plan) == "#o.#"
    assert Way.named("policy-c5", 20) == Way(None, None, cache=0.05)
    alone = Way.named("alone-c10", 20)
    assert alone.plan.forwards == 20 and alone.cache == 0.1
    bad = ["paced-1-rx", "paced-1-r0", "paced-1-s0", "paced-1-s101", "slow", "policy-s90-c5", "even-5-r3-c5", "drs"]
    for name in bad:
        with pytest.raises(ValueError):
            Way.named(name, 20)


@pytest.mark.parametrize("tokens", [320, 4680, 4681])
def test_a_latent_has_at_least_the_tokens_asked_for_and_few_more(tokens):
    grid = TokenGrid.of_latent(latent_of(tokens))
    assert tokens <= grid.tokens < 1.15 * tokens + 60


@pytest.mark.parametrize("active", [0.2, 0.35, 0.5])
def test_a_region_of_a_wanted_size(active):
    grid = TokenGrid.of_latent(latent_of(4680))
    assert abs(scope_of(region_of(grid, active), grid).active_share - active) < 0.06


def test_quality_writes_rows_and_a_plan_that_speed_runs(tmp_path, capsys):
    out = tmp_path / "quality"
    assert main([*QUALITY, "--out", str(out), "--plan", "policy", "paced-1", "paced-1-c50", "alone-c50", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    lines = {line["plan"]: line for line in told["table"]}
    assert set(lines) == {"dense", "policy", "paced-1", "paced-1-c50", "alone-c50"} and lines["paced-1"]["hits"] == 2
    assert lines["paced-1-c50"]["cost"] < min(lines["paced-1"]["cost"], lines["alone-c50"]["cost"])
    assert lines["paced-1"]["cost"] < lines["dense"]["cost"] == 6
    assert len(lines["paced-1"]["hits_less_dense"]) == 3
    before = (out / "rows.jsonl").read_text()
    assert main([*QUALITY, "--out", str(out), "--plan", "policy", "paced-1"]) == 0  # goes on, and there is nothing left
    assert (out / "rows.jsonl").read_text() == before and "paced-1" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*QUALITY[:-1], "proof", "--out", str(out), "--plan", "policy"])
    assert "other settings" in capsys.readouterr().err

    plan = plan_of(out / "plan.json", "paced-1").plan
    assert str(plan) == str(Way.named("paced-1", 6).plan)
    speed = ["bench", "speed", "--plan", str(out / "plan.json"), "--name", "paced-1", "--tokens", "80"]
    assert main([*speed, "--repeats", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"] == str(plan) and found["dit_speedup"] > 0 and 0 <= found["miss_overhead"] < 1
    assert found["parts"].keys() == {"model", "carnator"}
    paced = lines["paced-1"]
    assert found["hits"] == 2 and found["faithfulness"] == pytest.approx(paced["faithfulness"][0], abs=1e-3)
    less = found["faithfulness"] - found["faithfulness_dense"]
    assert less == pytest.approx(paced["hits_less_dense"][0], abs=1e-3)


def test_a_plan_of_regions_alone_is_timed_against_the_full_run(tmp_path, capsys):
    levels = [1.0, 0.9, 0.75, 0.5]
    steps = [{"sigma": s, "kind": kind} for s, kind in zip(levels, ("dense", "region", "region", "dense"), strict=True)]
    quality = {"hits": 1, "faithfulness": 1.0, "faithfulness_dense": 1.0}
    told = {"steps": steps, "active": 0.2, "evidence": 0.1, "density": None, "kept": None, "quality": quality}
    (tmp_path / "plan.json").write_text(json.dumps({"plans": {"drrd": told}}))
    how = ["--tokens", "320", "--repeats", "1", "--json"]
    assert main(["bench", "speed", "--plan", str(tmp_path / "plan.json"), *how]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"] == "#oo#" and found["skip_only_speedup"] == 1
    assert found["joint_speedup"] == found["dit_speedup"]


def test_speed_without_a_plan_says_what_writes_one(tmp_path, capsys):
    (tmp_path / "plan.json").write_text('{"plans": {"policy": null}}')
    with pytest.raises(SystemExit):
        main(["bench", "speed", "--plan", str(tmp_path / "plan.json")])
    assert "bench quality" in capsys.readouterr().err


def test_what_a_region_must_see_is_measured_at_full_steps(capsys):
    how = ["--grid", "small", "--pairs", "1", "--steps", "12", "--plan", "paced-1", "--json"]
    assert main(["bench", "context", *how]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps_measured"] > 0 and set(told["off"]) == {*WAYS, "active", "band"}
    assert told["off"]["remembered"] < min(told["off"][way] for way in ("pooled", "answer"))
