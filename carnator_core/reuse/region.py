"""Region steps of one joint run: which tokens they compute is looked up anew at every full step.

The scope is where the target's own prediction differs from the donor's at that level. At the probe a change of camera
or motion has hardly begun to show, so a scope that was fixed there would miss it; here it grows with the difference,
and where it grows too large the steps are simply full.
"""

from __future__ import annotations

import torch

from ..grid import TokenGrid
from ..signature.evidence import where_different
from .scope import Scope, scope_of
from .trajectory import Trajectory
from .window import TokenWindow


class RegionSteps:
    """`layers`: how many blocks the transformer has. `forced`: a region (t, h, w) to take whatever differs."""

    def __init__(self, layers: int, grid: TokenGrid, donor: Trajectory, forced: torch.Tensor | None = None):
        self.window, self.grid, self.donor, self.forced = TokenWindow(layers), grid, donor, forced
        self.scope: Scope | None = None
        self._weight: torch.Tensor | None = None
        self._shares: list[tuple[float, float]] = []

    @staticmethod
    def possible(layers: int) -> bool:
        """Whether a transformer of so many blocks has a middle."""
        return layers > 0 and TokenWindow(layers).depth > 0

    def look(self, sigma: float, x0: torch.Tensor) -> None:
        """After a full step: the scope of the region steps that follow, None where all had better be full."""
        region = where_different(x0, self.donor.at(sigma), self.grid) if self.forced is None else self.forced
        self.scope = scope_of(region, self.grid)
        if self.scope is not None:
            self._weight = self.grid.to_latent(self.scope.weight[None, None].to(x0.device), tuple(x0.shape))

    def begin(self, planned: bool) -> TokenWindow:
        """The window, ready for one step: a region if that is planned and there is a scope, else all tokens."""
        self.window.begin(self.scope.index if planned and self.scope is not None else None)
        return self.window

    @property
    def partial(self) -> bool:
        """Whether the step under way computed a part of the tokens."""
        return self.scope is not None and self.window.was_partial

    def blend(self, x0: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        """W x0 + (1 - W) answer."""
        return (self._weight * x0.float() + (1 - self._weight) * answer).to(x0.dtype)

    def count(self) -> float:
        """Note one region step; its cost in full forwards. Attention, which grows faster than the number of tokens, is
        counted as if it did not."""
        self._shares.append((self.scope.active_share, self.scope.computed_share))
        return 1 - self.window.share_of_layers() * (1 - self.scope.computed_share)

    def shares(self) -> tuple[float | None, float | None]:
        """Mean active and computed shares of the region steps so far; None where there were none."""
        if not self._shares:
            return None, None
        active, computed = zip(*self._shares, strict=True)
        return sum(active) / len(active), sum(computed) / len(computed)
