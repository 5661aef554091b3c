"""The embedded model's pipeline: a prompt goes in, a clip and a report come out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import backbones
from ..attention.connectivity import Connectivity
from ..bank import Bank
from ..gate.policy import DEFAULT, policy_named
from ..mini import codec, sample, text
from ..mini import model as mini
from ..report import RunReport
from ..request import Identity, Profile, Request, digest_of_tensor, digest_of_weights, unpadded
from ..reuse.engine import Run
from ..reuse.plan import Plan
from ..reuse.seeds import DONOR, OWN, with_donors_noise
from ..signature.evidence import Evidence
from ..signature.taps import Taps
from .first_block import FirstBlockWatch


@dataclass(frozen=True)
class Clip:
    """`latent` (1, 16, 5, h, w), `frames` (3, 5, 2h, 2w) in [-1, 1]; `evidence` only where a donor was judged."""

    prompt: str
    latent: torch.Tensor
    frames: torch.Tensor
    report: RunReport
    evidence: Evidence | None


class Generator:
    """The embedded model with a bank. Weights are loaded once and digested once."""

    def __init__(
        self,
        bank: Bank,
        policy: str = DEFAULT,
        weights: Path = mini.WEIGHTS,
        guidance: float | None = None,
        model: torch.nn.Module | None = None,
    ):
        """`model`: another Wan transformer of 16 channels and text rows of 4096 in the embedded one's place."""
        self.model = mini.load(weights) if model is None else model
        self.backbone = backbones.find(self.model)
        self.bank, self.policy = bank, policy_named(policy)
        self.guidance = sample.GUIDANCE if guidance is None else guidance
        self.weights = digest_of_weights(self.model.named_parameters())

    def request(self, prompt: str, seed: int, noise: torch.Tensor, levels: torch.Tensor) -> Request:
        uncond = digest_of_tensor(unpadded(text.encode([""])[0])) if self.guidance != 1 else ""
        identity = Identity(self.weights, tuple(noise.shape), "float32", "flow", self.guidance, uncond)
        rows = unpadded(text.encode([prompt])[0])
        sigmas = tuple(float(s) for s in levels)
        return Request(identity, Profile(rows, digest_of_tensor(noise), sigmas, "euler", prompt, seed))

    @torch.no_grad()
    def __call__(
        self,
        prompt: str,
        seed: int = 0,
        size: int = 64,
        steps: int = 50,
        donor: str | None = None,
        forced: Plan | None = None,
        on_step: Callable[[int, int], None] | None = None,
        seeds: str = OWN,
        latent: tuple[int, int, int] | None = None,
        region: torch.Tensor | None = None,
        sparse: Connectivity | None = None,
        refresh: int | None = None,
    ) -> Clip:
        """Generate a clip of `size` x `size` pixels. `on_step(done, steps)` after each step.

        `seeds`: "own", or "donor" to start from the noise of the nearest donor instead. `latent`: (T, h, w) instead of
        what `size` gives. `region`, `refresh`: as in `Run`. `sparse`: a fresh one for sparse attention where `Run`
        allows it.
        """
        levels = sample.sigmas(steps)

        def begin(seed: int) -> tuple[torch.Tensor, Request]:
            noise = sample.noise([seed], size) if latent is None else sample.noise_of(seed, latent)
            return noise, self.request(prompt, seed, noise, levels)

        x, request = begin(seed)
        lent = with_donors_noise(request, self.bank, begin) if seeds == DONOR else None
        x, request = lent[:2] if lent else (x, request)
        grid = self.backbone.grid_of(self.model, tuple(x.shape))
        taps = Taps(grid, len(request.profile.conditioning))
        cache = FirstBlockWatch(self.model)
        how = dict(layers=cache.layers, region=region, refresh=refresh)
        run = Run(request, self.bank, self.policy, grid, taps, donor, forced, **how)
        run.report.warnings.extend(lent[2:] if lent else ())
        result = run.exact()
        try:
            if result is None:
                result = self._denoise(run, x, levels.tolist(), on_step, cache.beside(sparse, run), cache)
        except BaseException as error:
            run.abort(type(error).__name__)
            raise
        report = run.finish(result)
        return Clip(prompt, result, codec.decode(result)[0], report, run.evidence)

    def _denoise(
        self,
        run: Run,
        x: torch.Tensor,
        levels: list[float],
        on_step: Callable | None,
        sparse: Connectivity | None,
        cache: FirstBlockWatch,
    ) -> torch.Tensor:
        """Euler, as `mini.sample` does it without reuse."""
        first = next(self.model.parameters())
        x = x.to(first.device)
        cond, uncond = (text.encode([p]).to(first) for p in (run.request.profile.prompt, ""))
        for i, (sigma, following) in enumerate(zip(levels[:-1], levels[1:], strict=True)):
            tapped = i == run.probe - 1 and self.bank.mode != "off"
            branches = run.taps.read_branches if tapped and self.guidance != 1 else None

            def compute(x=x, sigma=sigma, tapped=tapped, branches=branches) -> torch.Tensor:
                with self._around(run, sigma, tapped, sparse), cache.around("both branches"):
                    return sample.guided_x0(self.model, x, sigma, cond, uncond, self.guidance, branches)

            before = sparse.applied if sparse else 0
            x0 = run.step(sigma, compute)
            cache.tell(run)
            if sparse and run.probing_last(sigma):
                sparse.close()
            if sparse and sparse.applied > before:
                run.was_sparse(sparse.density)
            x = x0 + (following / sigma) * (x - x0)
            if on_step:
                on_step(i + 1, len(levels) - 1)
        if sparse:
            run.report.scope.density = sparse.density
            run.report.warnings.append(sparse.told(run.becomes_donor))
        return x

    def _around(self, run: Run, sigma: float, tapped: bool, sparse: Connectivity | None) -> AbstractContextManager:
        """What the model is wrapped in for one call."""
        stack = ExitStack()
        window = run.window_at(sigma)
        if tapped:
            stack.enter_context(self.backbone.tapped(self.model, run.taps))
        recording = run.probing_last(sigma)
        attend = None
        if sparse and (recording or run.may_be_sparse(sigma)):
            attend = sparse.stand_in((0,) if self.guidance == 1 else (0, 1), recording)
        if window:
            stack.enter_context(self.backbone.windowed(self.model, window, attend))
        elif attend:
            stack.enter_context(self.backbone.attending(self.model, attend))
        return stack
