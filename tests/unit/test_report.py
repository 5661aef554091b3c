from __future__ import annotations

import json

from carnator_core.report import RunReport, StepRow


def report(*kinds: str, seconds: float = 2.0) -> RunReport:
    rows = [
        StepRow(i, 1 - i / 10, kind, seconds if kind == "dense" else 0.0, float(kind == "dense"))
        for i, kind in enumerate(kinds)
    ]
    return RunReport(decision="joint", reason="one word differs", steps=rows)


def test_forwards_and_speedup_follow_from_the_steps():
    found = report("dense", "skipped", "dense", "skipped")
    found.seconds.update(model=4.0, carnator=1.0)
    assert found.forwards == 2
    assert found.dense_seconds == 8.0
    assert found.speedup == 8.0 / 5.0


def test_a_report_without_dense_steps_claims_no_speedup():
    assert report("exact", "exact").speedup is None
    assert RunReport().speedup is None


def test_the_report_is_json_and_carries_what_people_read():
    found = report("dense", "skipped")
    data = json.loads(found.to_json())
    assert {"decision", "reason", "donor", "risk", "threshold", "certificate", "scope", "steps", "forwards"} <= set(
        data
    )
    assert "joint" in found.summary() and "1 of 2 steps reused" in found.summary()
    assert found.summary().endswith("one word differs")
