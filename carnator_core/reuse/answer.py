"""Answers for skipped steps, in x0.

    D(sigma) = P_target(sigma) + U (x0_donor(sigma) - P_donor(sigma))

P predicts a course from its last three computed predictions, as a linear combination whose weights are fitted where the
truth is known: on the donor, at the very same noise levels. So the donor lends twice: how such courses go on at this
level, and, where the agreement U says that both show the same thing, what the prediction still misses. Where they
disagree the target's own predictions remain, continued by the donor's weights. At a dense step nothing is answered.
"""

from __future__ import annotations

import torch

from ..grid import TokenGrid
from ..signature.agreement import SOFTNESS, agreement
from .trajectory import Trajectory


class FrozenAnswer:
    """Control without history: the target's latest own prediction is held."""

    def __init__(self) -> None:
        self._own: torch.Tensor | None = None

    def observe(self, sigma: float, x0: torch.Tensor) -> None:
        self._own = x0

    def answer(self, sigma: float) -> torch.Tensor:
        if self._own is None:
            raise RuntimeError("no dense step has been observed yet; the probe must come first")
        return self._own


class ForecastAnswer:
    """Control without history: the target's last two own predictions, extended linearly in sigma."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, torch.Tensor]] = []

    def observe(self, sigma: float, x0: torch.Tensor) -> None:
        self._seen = [*self._seen[-1:], (sigma, x0)]

    def answer(self, sigma: float) -> torch.Tensor:
        if not self._seen:
            raise RuntimeError("no dense step has been observed yet; the probe must come first")
        if len(self._seen) == 1:
            return self._seen[0][1]
        (before, first), (latest, second) = self._seen
        return second + (second - first) * ((sigma - latest) / (latest - before))


MEMORY = 3  # computed predictions that a combination is made of; a fourth was seen to bring under 0.1 dB
RIDGE = 1e-4  # of the fit, in mean squares of its terms


def fitted_weights(terms: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Weights (B, K) with which the terms (K, B, ...) come nearest to the truth (B, ...) in least squares."""
    rows = terms.flatten(2).transpose(0, 1).float()
    gram = rows @ rows.mT
    size = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(1e-12)
    gram = gram + RIDGE * size * torch.eye(gram.shape[-1], device=gram.device)
    return torch.linalg.solve(gram, (rows @ truth.flatten(1).float()[..., None])).squeeze(-1)


class DonorAnswer:
    """The target's own course continued as the donor's went on, corrected where both agree."""

    def __init__(self, donor: Trajectory, grid: TokenGrid, softness: float = SOFTNESS):
        self.donor, self.grid, self.softness = donor, grid, softness
        self._own: list[torch.Tensor] = []
        self._lent: list[torch.Tensor] = []
        self._trust: torch.Tensor | None = None

    def observe(self, sigma: float, x0: torch.Tensor) -> None:
        """A dense step's own prediction."""
        lent = self.donor.at(sigma).to(x0.device)
        self._own = [*self._own[-MEMORY + 1 :], x0.float()]
        self._lent = [*self._lent[-MEMORY + 1 :], lent]
        self._trust = agreement(x0, lent, self.grid, self.softness)

    def answer(self, sigma: float) -> torch.Tensor:
        """The prediction for a step that is not computed, (B, C, T, H, W) in float32."""
        if not self._own:
            raise RuntimeError("no dense step has been observed yet; the probe must come first")
        (*before, latest), (*lent_before, lent) = self._own, self._lent
        rest = self.donor.at(sigma).to(latest.device) - lent
        own = latest
        if before:
            terms = torch.stack([x - lent for x in lent_before])
            weights = fitted_weights(terms, rest)
            rest = rest - torch.einsum("bk,kb...->b...", weights, terms)
            own = latest + torch.einsum("bk,kb...->b...", weights, torch.stack([x - latest for x in before]))
        return own + self._trust * rest
