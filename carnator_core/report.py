"""The run report: one object that the file, the node, the widget and the API all carry."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field

SCHEMA = 1
DECISIONS = ("exact", "joint", "miss", "off")
KINDS = ("dense", "skipped", "region", "sparse", "cached", "exact")


@dataclass
class StepRow:
    """What one step was: `cost` in full-forward equivalents (0 for a skipped one, 1 for a dense one)."""

    index: int
    sigma: float
    kind: str
    seconds: float = 0.0
    cost: float = 1.0


@dataclass
class Scope:
    """Shares of the token grid and of attention, each in [0, 1]; None where it does not apply."""

    evidence: float | None = None
    active: float | None = None
    context: float | None = None
    density: float | None = None
    coverage: float | None = None


@dataclass
class RunReport:
    decision: str = "miss"
    reason: str = ""
    donor: str | None = None
    risk: float | None = None
    threshold: float | None = None
    certificate: str = "not certified"
    discrepancies: dict[str, float] = field(default_factory=dict)
    # By how much the answers were off, as the next computed step showed: the worst stretch of answered steps, root mean
    # square over the clip, in deviations of the prediction. What was found is made up for; None where nothing was.
    answer_error: float | None = None
    scope: Scope = field(default_factory=Scope)
    steps: list[StepRow] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # by part: model, carnator, ...
    warnings: list[str] = field(default_factory=list)
    written: str | None = None  # id of the entry this run left in the bank
    known_dense_seconds: float | None = None  # of the very same request, computed before
    started: float = field(default_factory=time.time)
    schema: int = SCHEMA

    @property
    def forwards(self) -> float:
        """Full-forward equivalents that were computed."""
        return sum(row.cost for row in self.steps)

    @property
    def dense_seconds(self) -> float | None:
        """What the same run would have taken densely, estimated from its own dense steps where it has any."""
        dense = sorted(row.seconds for row in self.steps if row.kind == "dense")
        return dense[len(dense) // 2] * len(self.steps) if dense and self.steps else self.known_dense_seconds

    @property
    def speedup(self) -> float | None:
        """Estimated dense seconds over the seconds that the model and Carnator took."""
        spent = self.seconds.get("model", 0.0) + self.seconds.get("carnator", 0.0)
        dense = self.dense_seconds
        return dense / spent if dense and spent > 0 else None

    def to_dict(self) -> dict:
        data = asdict(self)
        data.update(forwards=self.forwards, dense_seconds=self.dense_seconds, speedup=self.speedup)
        return data

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def summary(self) -> str:
        """One line for people."""
        skipped = sum(row.kind in ("skipped", "exact") for row in self.steps)
        line = f"Carnator: {self.decision}"
        if self.donor:
            line += f" (donor {self.donor[:8]})"
        if self.risk is not None and self.threshold is not None:
            line += f", risk {self.risk:.2f} of {self.threshold:.2f}"
        if self.steps:
            line += f", {skipped} of {len(self.steps)} steps reused"
        if partly := sum(row.kind == "region" for row in self.steps):
            line += f", {partly} in a region"
        if self.answer_error is not None:
            line += f", answers off by {self.answer_error:.1%}"
        if self.speedup and skipped:
            line += ", over 100x" if self.speedup > 100 else f", about {self.speedup:.2f}x"
        return line + (f": {self.reason}" if self.reason else "")
