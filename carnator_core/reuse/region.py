"""Region steps of one joint run: which tokens they compute is looked up anew at every full step.

The scope is where the target's own prediction differs from the donor's at that level. At the probe a change of camera
or motion has hardly begun to show, so a scope that was fixed there would miss it; here it grows with the difference,
and where it grows too large the steps are simply full.
"""

from __future__ import annotations

import torch

from ..grid import TokenGrid
from ..signature.evidence import where_different
from .plan import Plan
from .scope import Scope, scope_of
from .trajectory import Trajectory
from .window import TokenWindow


class RegionSteps:
    """`layers`: how many blocks the host can send through a window, 0 for none. `forced`: a region (t, h, w) to take
    whatever differs. Nothing is kept before `foresee` or `follow`."""

    def __init__(self, layers: int, grid: TokenGrid, forced: torch.Tensor | None = None):
        self.window, self.grid, self.forced = TokenWindow(layers), grid, forced
        self.donor: Trajectory | None = None  # None before a hit that has region steps
        self.scope: Scope | None = None
        self.foreseen = False  # whether the window saw the probe's last step
        self._weight: torch.Tensor | None = None
        self._shares: list[float] = []

    @property
    def possible(self) -> bool:
        """Whether the transformer has enough blocks to have a middle."""
        return self.window.depth > 0

    def foresee(self) -> TokenWindow:
        """The window for the probe's last step, if a region step may be the next to be computed."""
        self.foreseen = True
        return self.begin(False)

    def follow(self, donor: Trajectory) -> None:
        """A hit with region steps begins."""
        self.donor = donor

    def missing(self) -> str:
        """Why no region can be computed though the probe's last step was foreseen to come before one; empty if it can,
        or was not foreseen."""
        return self.window.context.missing() if self.foreseen else ""

    def pay(self, plan: Plan, dearest: float) -> bool:
        """Whether the plan costs no more than `dearest`, as far as that is known: a step that was not foreseen to come
        before a region tells nothing."""
        return not self.foreseen or (self.scope is not None and self.cost_of(plan) <= dearest)

    def look(self, sigma: float, x0: torch.Tensor) -> None:
        """After a full step: the scope of the region steps that follow, None where all had better be full."""
        region = where_different(x0, self.donor.at(sigma), self.grid) if self.forced is None else self.forced
        self.scope = scope_of(region, self.grid)
        if self.scope is not None:
            self._weight = self.grid.to_latent(self.scope.weight[None, None].to(x0.device), tuple(x0.shape))

    @property
    def ready(self) -> bool:
        """Whether the next step could compute a region."""
        return self.scope is not None and not self.window.context.missing()

    def release(self) -> None:
        """Give the memory back; no region step follows."""
        self.window.release()
        self.donor = self.scope = None

    def begin(self, planned: bool) -> TokenWindow:
        """The window, ready for one step: a region if that is planned and there is a scope, else all tokens."""
        self.window.begin(self.scope.index if planned and self.scope is not None else None)
        return self.window

    @property
    def partial(self) -> bool:
        """Whether the step under way computed a part of the tokens."""
        return self.scope is not None and self.window.was_partial

    @property
    def weight(self) -> torch.Tensor | None:
        """W of the scope on latent positions, (1, 1, T, h, w) in [0, 1]; None without a scope."""
        return self._weight if self.scope is not None else None

    @property
    def cost(self) -> float:
        """Of a region step, in full forwards: all but the first layers compute a share of the tokens."""
        return 1 - self.window.share_of_layers() * (1 - self.scope.active_share)

    def cost_of(self, plan: Plan) -> float:
        """Of a whole run under this plan, were the scope to stay."""
        return plan.forwards - (1 - self.cost) * len(plan.region)

    def count(self) -> float:
        """Note one region step; its cost."""
        self._shares.append(self.scope.active_share)
        return self.cost

    def shares(self) -> tuple[float | None, float | None]:
        """Mean shares of the tokens that the region steps so far computed, and that they only saw; None without any."""
        if not self._shares:
            return None, None
        active = sum(self._shares) / len(self._shares)
        return active, 1 - active
