"""The engine: one sampling run as a state machine that a host drives, in guided x0.

    run = Run(request, bank, policy)
    stored = run.exact()                  # a result that is bit-equal to this very request's, or None
    x0 = run.step(sigma, compute)         # once per model call; `compute` is the host's own forward
    report = run.finish(result)           # keeps a computed run as a donor

The probe runs dense; after it the nearest donors are recalled and judged, and the rest is planned; where answers turn
out worse than the policy takes, more is computed. Until the first skipped step nothing of the run is touched, so a miss
is the run itself. A host that computes a step in several calls uses `answer`, `window_at`, `blended` and `observe`
instead of `step`. No method but `compute` itself raises because of a bank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from ..bank import Bank, Entry, EntryDraft
from ..gate.choose import Choice, Target, choose
from ..gate.policy import Policy
from ..grid import TokenGrid
from ..report import RunReport, StepRow
from ..request import Request
from ..schedule import finish_steps, is_level, probe_steps, step_of
from ..signature.early import EarlySignature
from ..signature.evidence import Evidence
from ..signature.taps import Taps
from .answer import MEMORY, DonorAnswer
from .correction import CorrectedAnswer
from .partly import PartlyCorrected
from .plan import Plan, dense_plan, halved, plan_of
from .region import RegionSteps
from .trajectory import Trajectory
from .window import TokenWindow

T = TypeVar("T")

KEEP_BYTES = 512 * 2**20  # of predictions that a run remembers, in 16 bits
KEEP_LEAST = 8
# Of the computed steps between skipped ones every how-many-th is full; the others compute a region. 1: all are full, as
# region steps do not pay on long schedules: another full step brings more there than three region steps, so smooth is
# the course. On short ones they do (`plan.short_plan`).
REFRESH = 1
WORTH = 0.9  # share of the cost without regions that a plan with them may have, as it comes less near
COLLAPSE = 0.05  # a prediction whose deviation falls to this share of the last computed one's has collapsed


def kept_levels(steps: int, latent_numel: int) -> list[int]:
    """Steps whose predictions are kept: all while they fit `KEEP_BYTES`, else evenly spread with both ends."""
    count = min(steps, max(KEEP_LEAST, KEEP_BYTES // max(1, 2 * latent_numel)))
    if count >= steps:
        return list(range(steps))
    return sorted({round(i * (steps - 1) / (count - 1)) for i in range(count)})


class Run:
    """One target. `grid`: the model's token grid; `taps`: what the host's taps write to, if it has any; `layers`: how
    many blocks the host can send through a `TokenWindow`, 0 for none; `region`: an evidence region (t, h, w) to take
    instead of the found one (for measurements); `refresh`: of the computed steps of a hit every how-many-th is full.

    `donor`: judge this entry alone instead of the nearest ones. `forced`: take this plan with the accepted donor
    whatever the risk (for measurements). `probe`: the probe's share of the schedule instead of the usual one.
    """

    def __init__(
        self,
        request: Request,
        bank: Bank,
        policy: Policy,
        grid: TokenGrid,
        taps: Taps | None = None,
        donor: str | None = None,
        forced: Plan | None = None,
        probe: float | None = None,
        layers: int = 0,
        region: torch.Tensor | None = None,
        refresh: int | None = None,
    ):
        self.request, self.bank, self.policy, self.grid, self.taps = request, bank, policy, grid, taps
        self._wanted, self._forced = donor, forced
        self.sigmas = request.profile.sigmas[:-1]
        self.steps = len(self.sigmas)
        self.probe = probe_steps(self.steps) if probe is None else probe_steps(self.steps, probe)
        self.plan = dense_plan(self.sigmas)
        self.report = RunReport(reason="the run ended before the gate was asked")
        self.evidence: Evidence | None = None
        self._noted_before = bank.noted  # warnings of earlier runs
        self._decided = False
        self._tainted = ""  # why this run must not become a donor
        self._stopped = ""  # why reuse ended early
        self._answerer: CorrectedAnswer | PartlyCorrected | None = None
        self.refresh = REFRESH if refresh is None else refresh
        self._regions = RegionSteps(layers, grid, region)
        self._partly = False  # whether the call under way was to compute a region
        self._spread: float | None = None
        self._seen: set[int] = set()
        self._keep = set(kept_levels(self.steps, math.prod(request.identity.latent_shape)))
        self._kept: dict[int, torch.Tensor] = {}
        self._probed: list[tuple[float, torch.Tensor]] = []  # the probe's last predictions
        self._last: tuple[float, torch.Tensor] | None = None

    # --- what a host calls ---

    def exact(self) -> torch.Tensor | None:
        """The stored result of this very request, on the CPU; then the host need not call `step` at all."""
        with self._own_time():
            info = self.bank.exact(self.request)
            result = self.bank.result(info.id) if info and self._wanted in (None, info.id) else None
            if result is None:
                return None
            self._decided, self._tainted = True, "an exact result"
            self.report.decision, self.report.donor, self.report.risk = "exact", info.id, 0.0
            self.report.threshold = self.policy.threshold
            self.report.reason = "this very request was computed before; its stored result is returned"
            self.report.known_dense_seconds = info.dense_seconds
            self.report.steps = [StepRow(i, s, "exact", cost=0.0) for i, s in enumerate(self.sigmas)]
            self.bank.touch(info.id, info.dense_seconds)
            return result

    def step(self, sigma: float, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The guided x0 prediction of one model call, (B, C, T, H, W): answered, or computed and remembered."""
        answered = self.answer(sigma)
        if answered is not None:
            return answered
        started = time.perf_counter()
        x0 = compute()
        _wait_for(x0)
        seconds = time.perf_counter() - started
        x0 = self.blended(sigma, x0)
        self.observe(sigma, x0, seconds)
        return x0

    @torch.no_grad()
    def answer(self, sigma: float) -> torch.Tensor | None:
        """The prediction to use instead of the model's at this call; None when the model must be called."""
        with self._own_time():
            started = time.perf_counter()
            index = step_of(sigma, self.sigmas)
            if not is_level(sigma, self.sigmas):
                self.stop("the sampler calls the model between the steps of its schedule")
            elif index in self._seen:
                self.stop("the sampler calls the model more than once a step")
            x0 = self._guarded(lambda: self._respond(index, sigma))
            if x0 is None:
                return None
            self._seen.add(index)
            self.report.steps.append(StepRow(index, sigma, "skipped", time.perf_counter() - started, 0.0))
            return x0

    def region_planned(self, sigma: float) -> bool:
        """Whether the call at this level is to compute a part of the tokens; ask after `answer`."""
        planned = self.plan.kind(step_of(sigma, self.sigmas)) == "region"
        return planned and not self._stopped and self._regions.scope is not None

    def window_at(self, sigma: float) -> TokenWindow | None:
        """What the transformer's blocks must go through at this call, if anything; ask after `answer`."""
        self._partly = self.region_planned(sigma)
        if self._stopped:
            return None
        if step_of(sigma, self.sigmas) <= max(self.plan.region, default=-1):
            return self._regions.begin(self._partly)
        return self._regions.foresee() if self.probing_last(sigma) and self._foresees_regions() else None

    def _foresees_regions(self) -> bool:
        """Whether a region step may come before any other full one, so that the probe must remember for it."""
        if self.bank.mode == "off" or not self._regions.possible:
            return False
        plan = self._forced or self._planned()
        first = next((i for i in range(self.probe, self.steps) if plan.kind(i) != "skipped"), None)
        with self._own_time():
            return plan.kind(first) == "region" and (
                self._wanted is not None or bool(self.bank.recall(self.request, 1, only_same_noise=True))
            )

    @torch.no_grad()
    def blended(self, sigma: float, x0: torch.Tensor) -> torch.Tensor:
        """A computed prediction as the run takes it: W x0 + (1 - W) D(sigma) where only a region was computed.

        Also right for a single guidance branch, as guidance leaves what both branches share alone.
        """
        if not self._is_region:
            return x0
        with self._own_time():
            blended = self._guarded(lambda: self._answerer.blended(sigma, x0, self._regions.weight).to(x0.dtype))
            return x0 if blended is None else blended  # what the window carried, where nothing better is at hand

    @torch.no_grad()
    def observe(self, sigma: float, x0: torch.Tensor, seconds: float) -> None:
        """A computed (and blended) prediction and what it took."""
        x0 = x0.detach()
        with self._own_time():
            index = step_of(sigma, self.sigmas)
            row = StepRow(index, sigma, "dense", seconds)
            if self._is_region:
                row.kind, row.cost = "region", self._regions.count()
                self._guarded(lambda: self._look_at_region(index, sigma, x0))
            self.report.steps.append(row)
            self.report.seconds["model"] = self.report.seconds.get("model", 0.0) + seconds
            self._seen.add(index)
            self._last = (sigma, x0)
            if index in self._keep and not self._tainted:
                self._kept[index] = x0.to("cpu", torch.float16, copy=True)
            if index + 1 == self.probe or self._answerer is not None:
                self._spread = float(x0.std())
            if self._answerer is not None and row.kind == "dense":
                self._guarded(lambda: self._look(index, sigma, x0))
                if self._regions.donor is not None and not self._stopped:
                    self._guarded(lambda: self._look_for_region(index, sigma, x0))
            elif index < self.probe:
                self._probed = [*self._probed[-MEMORY + 1 :], (sigma, x0.clone())]

    def probing_last(self, sigma: float) -> bool:
        """Whether a call at this level is the probe's last step, the one that taps should read."""
        return step_of(sigma, self.sigmas) == self.probe - 1

    def may_be_sparse(self, sigma: float) -> bool:
        """Whether a call at this level may use sparse attention; ask after `answer`.

        Behind the probe and before the dense finish, and not in a run that is to become a donor: a missed run in full
        serves the next ones, which are then sparse and borrow.
        """
        between = self.probe <= step_of(sigma, self.sigmas) < self.steps - finish_steps(self.steps)
        return between and not self.becomes_donor and not self.region_planned(sigma)

    @property
    def becomes_donor(self) -> bool:
        """Whether the run, as far as it is known by now, will be kept."""
        return self.bank.mode == "on" and self.report.decision == "miss" and not self._tainted

    def was_sparse(self, density: float | None) -> None:
        """The last observed step used sparse attention, so this run is no truth that others may borrow from."""
        self._tainted = self._tainted or "sparse attention"
        self.report.steps[-1].kind = "sparse"
        self.report.scope.density = density

    def was_cached(self, cost: float) -> None:
        """A cache within the model had a part in the last observed step, which took `cost` of a full forward."""
        self._tainted = self._tainted or "a cache within the model answered some of its steps"
        row = self.report.steps[-1]
        row.kind, row.cost = "cached", cost

    def stop(self, reason: str) -> None:
        """End reuse for the rest of this run, which then makes no donor either; the first reason stays."""
        self._stopped = self._stopped or reason
        self._tainted = self._tainted or reason

    def finish(self, result: torch.Tensor | None) -> RunReport:
        """The report; a run that was computed in full, with its final latent, is kept as a donor."""
        with self._own_time():
            if not self._decided:
                self._guarded(self._decide)
            if self._stopped and self.report.decision == "joint":
                self.report.warnings.append(f"reuse ended: {self._stopped}")
            if self.report.decision == "miss" and any(row.kind == "cached" for row in self.report.steps):
                self.report.warnings.append(f"this run makes no donor: {self._tainted}")
            self._credit()
            if result is not None and not self._tainted and len(self._kept) == len(self._keep):
                self._write(result)
            self._release()
        fresh = self.bank.warnings_since(self._noted_before)
        self.report.warnings.extend(w for w in fresh if w not in self.report.warnings)
        return self.report

    def abort(self, reason: str) -> RunReport:
        """The run was interrupted or failed: nothing is kept."""
        self._tainted = self._tainted or reason
        self.report.warnings.append(f"the run did not end: {reason}")
        self._release()
        return self.report

    # --- inside ---

    def _own_time(self):
        return _clocked(self.report.seconds, "carnator")

    def _guarded(self, part: Callable[[], T]) -> T | None:
        """An error of our own, as memory that is not there, ends the reuse and not the user's run."""
        try:
            return part()
        except (RuntimeError, ValueError) as error:
            self._decided = True
            self.stop(f"an error of Carnator's own ({type(error).__name__}: {error})")
            if self.report.decision != "joint":
                self.report.reason = self._stopped
            return None

    @property
    def _is_region(self) -> bool:
        """Whether the call under way computed a part of the tokens only, whatever has stopped the reuse meanwhile."""
        return self._partly and self._regions.partial

    def _respond(self, index: int, sigma: float) -> torch.Tensor | None:
        if index >= self.probe and not self._decided:
            self._decide()
            if self._regions.donor is None:  # what was remembered serves nobody
                self._regions.release()
        if self._stopped or self.plan.kind(index) != "skipped":
            return None
        return self._answer(sigma)

    def _release(self) -> None:
        self._kept.clear()
        self._probed.clear()
        self._answerer, self._last = None, None
        self.report.scope.active, self.report.scope.context = self._regions.shares()
        self._regions.release()
        if self.taps:
            self.taps.release()

    def _decide(self) -> None:
        """The gate, once, with what the probe has seen."""
        self._decided = True
        self.report.threshold = self.policy.threshold
        if self._last is None or self.bank.mode == "off":
            self.report.decision = "off" if self.bank.mode == "off" else "miss"
            self.report.reason = "the bank is off" if self.bank.mode == "off" else self.report.reason
            return
        self.signature = EarlySignature.of_probe(self.request.profile.conditioning.cpu(), self._last[1], self.taps)
        best = self._best_donor()
        if self.taps:
            self.taps.release()
        if best is None:
            return
        verdict, self.evidence = best.verdict, best.evidence
        self.report.decision, self.report.reason, self.report.donor = verdict.decision, verdict.reason, best.entry.id
        self.report.risk, self.report.discrepancies = verdict.risk, verdict.discrepancies
        self.report.scope.evidence = best.evidence.share if best.evidence else None
        if verdict.decision == "joint" or self._forced:
            self._begin_joint(best.entry)
        if self.report.decision == "miss":
            self.report.donor = None

    def _best_donor(self) -> Choice | None:
        """The most promising donor, accepted or not; None (with the reason in the report) without any."""
        if self._stopped:
            self.report.reason = self._stopped
            return None
        self_qk = self.taps.self_qk if self.taps else None
        target = Target(self.request, self.signature, self.grid, self_qk)
        best = choose(target, self.bank, self.policy, self._wanted, self.report.warnings.append)
        if best is None:
            reason = self.bank.explain_empty(self.request) or "no donor could be read"
            self.report.reason = f"donor {self._wanted} is not usable here" if self._wanted else reason
        return best

    def _begin_joint(self, entry: Entry) -> None:
        """Load the donor's course and fix the plan; without a course the run stays dense."""
        predictions = entry.predictions()
        plan = self._forced or self._planned()
        if predictions is None or not plan.skipped | plan.region:
            self.report.decision = "miss"
            self.report.reason = (
                "the donor went away" if predictions is None else f"{self.steps} steps are too few to skip any"
            )
            return
        self._tainted = "a reused trajectory never becomes a donor"
        donor = Trajectory(entry.sigmas, predictions.to(self._last[1].device))
        self.report.decision = "joint"
        self.plan = plan = self._with_regions(plan, donor)
        kind = self.request.identity.parametrisation
        if plan.region:
            self._answerer = PartlyCorrected(lambda: DonorAnswer(donor, self.grid), plan, kind)
            self._answerer.weight = self._regions.weight
        else:
            self._answerer = CorrectedAnswer(DonorAnswer(donor, self.grid), plan, kind)
        for sigma, x0 in self._probed:
            self._answerer.observe(sigma, x0)
        self._kept.clear()

    def _with_regions(self, plan: Plan, donor: Trajectory) -> Plan:
        """The plan, with regions where it is to have any and they are to be had."""
        if not self._forced and not plan.region:
            plan = plan.regional(self.refresh)
        if not plan.region:
            return plan
        others = self._without_regions(plan)
        if not self._regions.possible:
            return others
        self._regions.follow(donor)
        if self._regions.foreseen:
            self._regions.look(*self._last)
        missing = self._regions.missing()
        if missing:
            self.report.warnings.append(f"no region was computed: {missing}")
        elif self._regions.pay(plan, math.inf if self._forced else WORTH * others.forwards):
            return plan
        self._regions.release()
        return others

    def _without_regions(self, plan: Plan) -> Plan:
        """What takes a plan's place where regions are not to be had."""
        return replace(plan, region=frozenset()) if self._forced else self._planned(regions=False)

    def _look_for_region(self, index: int, sigma: float, x0: torch.Tensor) -> None:
        """At a full step: what the next region step computes; without a region that step is planned as a full one."""
        self._regions.look(sigma, x0)
        self._answerer.weight = self._regions.weight
        later = [i for i in self.plan.region if i > index]
        if later and not self._regions.ready:
            self.plan = self._answerer.plan = replace(self.plan, region=self.plan.region - {min(later)})

    def _look(self, index: int, sigma: float, x0: torch.Tensor) -> None:
        """What a computed step tells of the answers before it; where they were off by more than the policy takes, the
        next stretch of answers is cut in two."""
        self._answerer.observe(sigma, x0)
        self._watch(index)

    def _look_at_region(self, index: int, sigma: float, x0: torch.Tensor) -> None:
        """The same at a region step, which tells of the answers within the region."""
        self._answerer.observe_region(sigma, x0, self._regions.weight)
        self._watch(index)

    def _watch(self, index: int) -> None:
        error = self._answerer.error
        if error is None:
            return
        self.report.answer_error = max(error, self.report.answer_error or 0.0)
        if error > self.policy.tolerance and not self._forced:
            self.plan = self._answerer.plan = halved(self.plan, index)

    def _planned(self, regions: bool = True) -> Plan:
        regions = regions and self._regions.possible
        return plan_of(self.policy, self.sigmas, self.probe, self.request.identity.parametrisation, regions)

    def _answer(self, sigma: float) -> torch.Tensor | None:
        x0 = self._answerer.answer(sigma)
        spread = float(x0.std())
        if not spread < float("inf") or (self._spread and spread < COLLAPSE * self._spread):
            self.stop("the answer collapsed, so the rest was computed")
            return None
        return x0

    def _credit(self) -> None:
        """Tell the bank what a joint hit saved, so that useful donors stay."""
        report = self.report
        if report.decision == "joint" and report.donor and report.dense_seconds:
            spent = sum(row.seconds for row in report.steps)
            self.bank.touch(report.donor, max(0.0, report.dense_seconds - spent))

    def _write(self, result: torch.Tensor) -> None:
        decision = self.report.decision
        if decision not in ("miss", "off") or self.bank.mode != "on":
            return
        levels = sorted(self._kept)
        dense = sum(row.seconds for row in self.report.steps)
        draft = EntryDraft(
            request=self.request,
            signature=self.signature.tensors(),
            predictions=torch.stack([self._kept[i] for i in levels]),
            prediction_sigmas=[self.sigmas[i] for i in levels],
            result=result,
            provenance={"computed": True, "decision": decision, "steps": self.steps, "dense_seconds": dense},
        )
        self.report.written = self.bank.write(draft)


@contextmanager
def _clocked(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Adds the time of a with block to one part of a report."""
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - started


def _wait_for(tensor: torch.Tensor) -> None:
    """Device work is done in the background; a step's seconds are honest only after it."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
