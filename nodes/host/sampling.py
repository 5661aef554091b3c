"""One sampling run of ComfyUI, driven through the core's engine.

`outer_sample` is the only thing that a node puts on a model. During a run it adds one wrapper to that run's own copy of
the options and takes it away again; no state outlives the run but its report and, for a second part that goes on from
its latent, which noise that latent holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from ...carnator_core.attention.connectivity import Connectivity
from ...carnator_core.bank import Bank
from ...carnator_core.gate.policy import policy_named
from ...carnator_core.report import RunReport
from ...carnator_core.request import Request
from ...carnator_core.reuse.engine import Run
from ...carnator_core.reuse.seeds import DONOR, with_donors_noise
from ...carnator_core.signature.evidence import Evidence
from ...carnator_core.signature.taps import Taps, middle_layer
from . import banks, events
from .families import family_of
from .identity import Undigestible, of_unknown_noise, request_of
from .setup import KEY, ORIGINS, REPORTS, Setup, Told, digest_of_latent, setup_of
from .supported import unsupported
from .taps import watched
from .window import windowed

UNKNOWN_NOISE = (
    "this run goes on from a latent that Carnator did not see being made, so only a run from the very same latent can"
    " lend to it; put Carnator on the model of the first part too"
)

LOG = logging.getLogger("carnator")


def outer_sample(executor: Any, noise, latent, sampler, sigmas, mask=None, callback=None, bar=False, seed=None, **more):
    """Around `CFGGuider.outer_sample`; returns a latent in the host's outer scaling."""
    guider = executor.class_obj
    setup = setup_of(guider.model_patcher)
    rest = (mask, callback, bar, seed)
    started = time.perf_counter()
    run, reason, noise = _begin(guider, setup, noise, latent, sampler, sigmas, mask, seed)
    if run is None:
        out = executor(noise, latent, sampler, sigmas, *rest, **more)
        _tell(setup, digest_of_latent(out), RunReport(decision="off", reason=reason))
        return out
    run.report.seconds["carnator"] = time.perf_counter() - started
    stored = run.exact()
    if stored is not None:
        return _finish(setup, run, stored.to(latent.device))
    try:
        out = _sample(executor, guider, setup, run, (noise, latent, sampler, sigmas, *rest), more)
    except BaseException as error:
        events.send_report(setup, run.abort(type(error).__name__))
        raise
    return _finish(setup, run, out)


def _begin(guider, setup: Setup, noise, latent, sampler, sigmas, mask, seed) -> tuple[Run | None, str, torch.Tensor]:
    """The run, or None and why everything is passed through; and the noise to start from."""
    off = setup.missing or ("the cache is off" if setup.cache.mode == "off" else "")
    if off and setup.sparse is None:
        return None, off, noise
    try:
        reason = unsupported(guider, sampler, sigmas, latent, mask)
        if reason:
            return None, f"passed through: {reason}", noise
        request = request_of(guider, sampler, sigmas, noise, latent, seed)
        bank = Bank(".", mode="off") if off else banks.bank_of(setup.cache)
        lent, start = None, noise
        if setup.seeds == DONOR and setup.donor is None and torch.count_nonzero(noise):
            lent = with_donors_noise(request, bank, _noise_again(guider, sampler, sigmas, latent))
        start, request = lent[:2] if lent else (noise, request)
        family, inner = family_of(guider.model_patcher.model), guider.model_patcher.model.diffusion_model
        grid = family.grid(inner, tuple(noise.shape))
        taps = None if off else Taps(grid, len(request.profile.conditioning))
        layers = len(family.blocks(inner))
        run = Run(request, bank, policy_named(setup.policy), grid, taps, setup.donor, probe=setup.probe, layers=layers)
        run.report.warnings.extend(lent[2:] if lent else ())
        if of_unknown_noise(request):
            run.report.warnings.append(UNKNOWN_NOISE)
        return run, "", start
    except Undigestible as error:
        return None, f"passed through: {error}", noise
    except Exception as error:  # a bug of ours must not cost a user's run
        LOG.exception("Carnator could not begin; the run goes on without it")
        return None, f"passed through: an error of Carnator's own ({type(error).__name__}: {error})", noise


def _noise_again(guider, sampler, sigmas, latent) -> Callable[[int], tuple[torch.Tensor, Request]]:
    """What the host's samplers make of a seed, and the request that it leads to."""
    from comfy.sample import prepare_noise

    def again(seed: int) -> tuple[torch.Tensor, Request]:
        noise = prepare_noise(latent, seed)
        return noise, request_of(guider, sampler, sigmas, noise, latent, seed)

    return again


def _sample(executor: Any, guider: Any, setup: Setup, run: Run, args: tuple, more: dict) -> torch.Tensor:
    """The host's sampling with each prediction answered or observed."""
    from comfy.patcher_extension import WrappersMP, add_wrapper_with_key

    steps = _Steps(run, setup, guider.model_patcher.model)
    add_wrapper_with_key(WrappersMP.PREDICT_NOISE, KEY, steps.predict, guider.model_options, is_model_options=True)
    try:
        return executor(*args, **more)
    finally:
        guider.model_options["transformer_options"]["wrappers"][WrappersMP.PREDICT_NOISE].pop(KEY, None)
        steps.tell()


class _Steps:
    """Every prediction of one run."""

    def __init__(self, run: Run, setup: Setup, model: Any):
        self.run, self.setup, self.family = run, setup, family_of(model)
        self.blocks = self.family.blocks(model.diffusion_model)
        self.middle = middle_layer(len(self.blocks))
        chosen = setup.sparse
        self.sparse = Connectivity(chosen.kept, chosen.kernel) if chosen else None

    def predict(self, inner: Any, x: torch.Tensor, timestep: torch.Tensor, options: dict | None = None, seed=None):
        """Around the guider's prediction: guided x0 of (B, C, T, H, W) latents in the model's space."""
        sigma, run = float(timestep.flatten()[0]), self.run
        last = run.probing_last(sigma)

        def compute() -> torch.Tensor:
            given, window = options or {}, run.window_at(sigma)
            sparse = self.sparse if self.sparse and (last or run.may_be_sparse(sigma)) else None
            taps = run.taps if last else None
            if taps is not None or sparse is not None:
                given = watched(given, self.family.watcher(run.grid, self.middle, taps, sparse, last))
            if window is not None:
                given = windowed(given, window, self.blocks, self.family.part, run.grid.tokens)
            return inner(x, timestep, given, seed)

        before = self.sparse.applied if self.sparse else 0
        x0 = run.step(sigma, compute)
        if self.sparse and last:
            self.sparse.close()
        if self.sparse and self.sparse.applied > before:
            run.was_sparse(self.sparse.density)
        events.send_step(self.setup, run)
        return x0 if x0.dtype == x.dtype else x0.to(x.dtype)

    def tell(self) -> None:
        """What became of sparse attention, for the report."""
        if self.sparse is None:
            return
        self.run.report.scope.density = self.sparse.density
        self.run.report.warnings.append(self.sparse.told(self.run.becomes_donor))


def _finish(setup: Setup, run: Run, out: torch.Tensor) -> torch.Tensor:
    report = run.finish(out.detach().cpu())
    if run.bank.mode == "off" and setup.sparse is not None:
        report.reason = f"nothing was reused: {setup.missing or 'the cache is off'}"
    latent = digest_of_latent(out)
    ORIGINS.put(latent, run.request.profile.noise)
    _tell(setup, latent, report, run.evidence)
    return out


def _tell(setup: Setup, latent: str, report: RunReport, evidence: Evidence | None = None) -> None:
    REPORTS.put(latent, Told(report, evidence))
    LOG.info(report.summary())
    events.send_report(setup, report)
