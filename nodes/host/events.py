"""What the browser is told while a run goes on; silent where no server runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...carnator_core.report import RunReport
    from ...carnator_core.reuse.engine import Run
    from .setup import Setup

STEP, REPORT = "carnator.step", "carnator.report"


def _server() -> Any:
    module = sys.modules.get("server")
    return getattr(getattr(module, "PromptServer", None), "instance", None)


def _send(event: str, setup: Setup, data: dict) -> None:
    server = _server()
    if server is None or not setup.nodes:
        return
    try:
        for node in setup.nodes:
            server.send_sync(event, {"node": node, **data}, server.client_id)
    except Exception:  # a browser that went away must not end a run
        return


def send_step(setup: Setup, run: Run) -> None:
    """After each model call: which step was what."""
    row = run.report.steps[-1] if run.report.steps else None
    if row is not None:
        _send(STEP, setup, {"index": row.index, "kind": row.kind, "steps": run.steps, "decision": run.report.decision})


def send_report(setup: Setup, report: RunReport) -> None:
    _send(REPORT, setup, {"report": report.to_dict(), "summary": report.summary()})
