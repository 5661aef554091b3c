"""The evidence region: where in the clip two requests differ (paper, section 3.2, appendix C).

Cross-attention of the changed words gives seeds, self-attention spreads them over what belongs together, and the
difference of the two x0 predictions adds whatever the words do not tell: the donor's larger object, a moved horizon.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..grid import TokenGrid, dilate, smooth
from .agreement import mean_agreement
from .alignment import Alignment, align
from .early import EarlySignature
from .taps import pieces

SEEDS, MOST_SEEDS = 0.05, 256  # share of tokens that become seeds, and as many noise seeds; and how many at most
FLOOR, SHARPNESS = 0.1, 1.0  # epsilon and gamma of the paper's fusion; it does not publish its own
LOW, HIGH = 0.35, 0.6  # hysteresis: a region holds a token above HIGH and all that hangs on it above LOW
DIFFERENT = 0.35  # root mean square x0 difference, in deviations of x0, at which a token counts as different
FAINT = 0.15  # the same where a changed word speaks of the token: words alone light up half of a clip
GLOBAL = 0.7  # a region that covers more of the grid than this has no place


@dataclass(frozen=True)
class Evidence:
    """What differs between a target and a donor, by name and by place."""

    words: Alignment
    field: torch.Tensor  # (t, h, w) in [0, 1]
    region: torch.Tensor  # (t, h, w) of bool
    difference: torch.Tensor  # (t, h, w), root mean square x0 difference in deviations of x0
    agreement: float  # mean trust over the clip, in [0, 1]

    @property
    def share(self) -> float:
        return self.region.float().mean().item()

    @property
    def is_global(self) -> bool:
        """Whether the change has no place of its own, as a camera word or everything's motion."""
        return self.share > GLOBAL


def normalised(field: torch.Tensor) -> torch.Tensor:
    """To [0, 1] between the field's 2nd and 98th percentile, so that one outlier does not set the scale."""
    low, high = torch.quantile(field.flatten()[:: max(1, field.numel() // 2**20)].float(), torch.tensor([0.02, 0.98]))
    return ((field - low) / (high - low).clamp_min(1e-8)).clamp(0, 1)


def word_field(maps: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    """Where the given text rows are looked at more than text usually is: (L, t, h, w) -> (t, h, w) in [0, 1]."""
    share = maps[list(rows)].sum(0) / maps.sum(0).clamp_min(1e-8)
    return normalised(smooth(share, 1))


def expand(seeds: torch.Tensor, noise: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Strongest self-attention to a seed less that to a noise seed, averaged over heads (paper, appendix C): (tokens,).

    `seeds`, `noise`: token indices; q, k (heads, tokens, d). Logits stand for attention: the softmax's denominator is
    the same for both and only scales a row.
    """
    scale = q.shape[-1] ** -0.5
    near, far = (k[:, index].float().mT * scale for index in (seeds, noise))
    rows = q.split(pieces(k.shape[0] * len(seeds)), dim=1)
    strongest = [(part.float() @ near).amax(-1) - (part.float() @ far).amax(-1) for part in rows]
    return torch.tanh(torch.cat(strongest, dim=1)).mean(0)


def fused(cross: torch.Tensor, self_qk: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """F = Norm[S (eps + (1 - eps) C^gamma)]; C alone where self-attention was not tapped. (t, h, w) in [0, 1]."""
    if self_qk is None:
        return cross
    flat = cross.flatten()
    count = min(MOST_SEEDS, max(1, round(SEEDS * flat.numel())))
    order = flat.argsort()
    spread = normalised(expand(order[-count:], order[:count], *self_qk)).reshape(cross.shape)
    return normalised(spread * (FLOOR + (1 - FLOOR) * cross**SHARPNESS))


def hysteresis(field: torch.Tensor, low: float = LOW, high: float = HIGH) -> torch.Tensor:
    """Tokens above `high`, and those above `low` that are connected to one within their frame: bool (t, h, w)."""
    region, allowed = field > high, field > low
    for _ in range(field.shape[-1] + field.shape[-2]):
        grown = dilate(region, 1) & allowed
        if torch.equal(grown, region):
            break
        region = grown
    return region


def x0_difference(target: torch.Tensor, donor: torch.Tensor, grid: TokenGrid) -> torch.Tensor:
    """Root mean square difference of two predictions in deviations of the target's, (t, h, w), largest of the batch."""
    target, donor = target.float(), donor.float().to(target.device)
    difference = grid.to_tokens((target - donor).pow(2).mean(1, keepdim=True)).amax(0)[0].sqrt()
    return difference / target.std().clamp_min(1e-6)


def where_different(target: torch.Tensor, donor: torch.Tensor, grid: TokenGrid) -> torch.Tensor:
    """Tokens at which two predictions of one noise level show different things, bool (t, h, w), freed of specks."""
    return smooth((x0_difference(target, donor, grid) > DIFFERENT).float(), 1).cpu() > 0.5


def gather(
    target: EarlySignature,
    donor: EarlySignature,
    grid: TokenGrid,
    self_qk: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Evidence:
    """Compare two signatures of one identity. `self_qk` is the target's own, as `Taps` holds it.

    Words that align entirely (a paraphrase) give no seeds; then only the x0 difference speaks.
    """
    words = align(target.conditioning, donor.conditioning)
    difference = x0_difference(target.x0, donor.x0, grid).cpu()
    field = torch.zeros_like(difference)
    if words.target and target.cross is not None:
        field = fused(word_field(target.cross, words.target), self_qk).cpu()
    if words.donor and donor.cross is not None:
        field = torch.maximum(field, word_field(donor.cross, words.donor).cpu())
    spoken = hysteresis(field) & (smooth((difference > FAINT).float(), 1) > 0.5)
    region = spoken | where_different(target.x0, donor.x0, grid)
    return Evidence(words, field, region, difference, mean_agreement(target.x0, donor.x0, grid))
