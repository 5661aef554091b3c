"""The methods that the harness compares. All spend the same number of forwards, except dense.

dense           the target's own full run; every distance is to its result
fewer-steps     a shorter schedule
own-frozen      the plan, skipped steps answered by the target's latest own prediction
own-forecast    the plan, skipped steps answered by a linear forecast of the target's own predictions
own-corrected   the same with our correction of past answers (`reuse.correction`), so that only the donor is missing
nirvana         the donor's noisy latent taken over at the step that leaves as many forwards (arXiv 2312.04429)
carnator        the plan, skipped steps answered with the donor (`reuse.answer.DonorAnswer`) and corrected
trust-none      the same with U = 0: the donor only tells how courses go on
trust-all       the same with U = 1: the donor's course is followed everywhere
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..bank.entry import as_lent
from ..grid import TokenGrid
from ..mini import sample
from ..reuse.answer import DonorAnswer, ForecastAnswer, FrozenAnswer
from ..reuse.correction import CorrectedAnswer
from ..reuse.plan import Plan, dense_plan
from ..reuse.trajectory import Trajectory
from ..schedule import probe_steps
from ..signature.agreement import agreement
from .traces import Pair
from .walk import Prompted, walk


@dataclass
class Case:
    """A batch of pairs with what every method may use: noise, the donors' dense runs, the plan."""

    wanted: Prompted
    noise: torch.Tensor  # (B, 16, T, h, w)
    donor_noisy: torch.Tensor  # (S, B, 16, T, h, w)
    donor_x0: torch.Tensor  # as a bank lends them
    plan: Plan
    grid: TokenGrid

    @classmethod
    def of(cls, model, pairs: Sequence[Pair], size: int, plan: Plan, guidance: float = sample.GUIDANCE) -> Case:
        """Runs the donors densely."""
        noise = sample.noise([p.seed for p in pairs], size)
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        lender = Prompted(model, [p.donor_prompt for p in pairs], guidance)
        own = sample.noise([p.donor_seed for p in pairs], size)
        walk(lender, own, dense_plan(plan.sigmas), FrozenAnswer(), lambda _, x, x0: seen.append((x, x0)))
        noisy, x0 = (torch.stack(part) for part in zip(*seen, strict=True))
        lent = torch.stack([as_lent(run) for run in x0.unbind(1)], 1).to(x0)
        wanted = Prompted(model, [p.prompt for p in pairs], guidance)
        return cls(wanted, noise, noisy, lent, plan, TokenGrid.of_latent(tuple(noise.shape)))

    def truth(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's own dense result, and how far it agrees with the donor at the end of the probe: (B,) in [0, 1].

        Agreement is the mean of the trust U over the clip, the number that the gate goes by.
        """
        seen: list[torch.Tensor] = []
        result = walk(
            self.wanted, self.noise, dense_plan(self.plan.sigmas), FrozenAnswer(), lambda _, __, x0: seen.append(x0)
        )
        last = probe_steps(len(seen)) - 1
        return result, agreement(seen[last], self.donor_x0[last], self.grid).flatten(1).mean(1)

    def with_plan(self, plan: Plan) -> Case:
        return Case(self.wanted, self.noise, self.donor_noisy, self.donor_x0, plan, self.grid)


def dense(case: Case) -> torch.Tensor:
    return walk(case.wanted, case.noise, dense_plan(case.plan.sigmas), FrozenAnswer())


def fewer_steps(case: Case) -> torch.Tensor:
    levels = sample.sigmas(case.plan.forwards)[:-1].tolist()
    return walk(case.wanted, case.noise, dense_plan(levels), FrozenAnswer())


def own_frozen(case: Case) -> torch.Tensor:
    return walk(case.wanted, case.noise, case.plan, FrozenAnswer())


def own_forecast(case: Case) -> torch.Tensor:
    return walk(case.wanted, case.noise, case.plan, ForecastAnswer())


def own_corrected(case: Case) -> torch.Tensor:
    return walk(case.wanted, case.noise, case.plan, CorrectedAnswer(ForecastAnswer(), case.plan))


def nirvana(case: Case) -> torch.Tensor:
    start = len(case.plan.sigmas) - case.plan.forwards
    return walk(case.wanted, case.donor_noisy[start], dense_plan(case.plan.sigmas), FrozenAnswer(), start=start)


class _EvenTrust(DonorAnswer):
    """The same trust everywhere."""

    def __init__(self, donor: Trajectory, grid: TokenGrid, trust: float):
        super().__init__(donor, grid)
        self.trust = trust

    def observe(self, sigma: float, x0: torch.Tensor) -> None:
        super().observe(sigma, x0)
        self._trust = torch.full_like(self._trust, self.trust)


def _lent(case: Case, answer: Callable[[Trajectory, TokenGrid], DonorAnswer]) -> torch.Tensor:
    donor = answer(Trajectory(case.plan.sigmas, case.donor_x0), case.grid)
    return walk(case.wanted, case.noise, case.plan, CorrectedAnswer(donor, case.plan))


def carnator(case: Case) -> torch.Tensor:
    return _lent(case, DonorAnswer)


def trust_none(case: Case) -> torch.Tensor:
    return _lent(case, lambda donor, grid: _EvenTrust(donor, grid, 0.0))


def trust_all(case: Case) -> torch.Tensor:
    return _lent(case, lambda donor, grid: _EvenTrust(donor, grid, 1.0))


METHODS: dict[str, Callable[[Case], torch.Tensor]] = {
    "dense": dense,
    "fewer-steps": fewer_steps,
    "own-frozen": own_frozen,
    "own-forecast": own_forecast,
    "own-corrected": own_corrected,
    "nirvana": nirvana,
    "carnator": carnator,
}
ABLATIONS: dict[str, Callable[[Case], torch.Tensor]] = {"trust-none": trust_none, "trust-all": trust_all}
