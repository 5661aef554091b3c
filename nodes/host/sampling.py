"""One sampling run of ComfyUI, driven through the core's engine.

`outer_sample` is the only thing that a node puts on a model. During a run it adds one wrapper to that run's own copy of
the options and takes it away again; no state outlives the run but its report.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from ...carnator_core.gate.policy import policy_named
from ...carnator_core.grid import TokenGrid
from ...carnator_core.report import RunReport
from ...carnator_core.request import digest_of_tensor
from ...carnator_core.reuse.engine import Run
from ...carnator_core.signature.taps import Taps
from . import banks, events
from .identity import Undigestible, request_of
from .setup import KEY, REPORTS, Setup, setup_of
from .supported import unsupported
from .taps import tapped_options

LOG = logging.getLogger("carnator")


def outer_sample(executor: Any, noise, latent, sampler, sigmas, mask=None, callback=None, bar=False, seed=None, **more):
    """Around `CFGGuider.outer_sample`; returns a latent in the host's outer scaling."""
    guider = executor.class_obj
    setup = setup_of(guider.model_patcher)
    rest = (mask, callback, bar, seed)
    started = time.perf_counter()
    run, reason = _begin(guider, setup, noise, latent, sampler, sigmas, mask, seed)
    if run is None:
        out = executor(noise, latent, sampler, sigmas, *rest, **more)
        _tell(setup, out, RunReport(decision="off", reason=reason))
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


def _begin(guider, setup: Setup, noise, latent, sampler, sigmas, mask, seed) -> tuple[Run | None, str]:
    """The run, or None and why everything is passed through."""
    missing = setup.missing
    if missing or setup.cache.mode == "off":
        return None, missing or "the cache is off"
    try:
        reason = unsupported(guider, sampler, sigmas, latent, mask)
        if reason:
            return None, f"passed through: {reason}"
        request = request_of(guider, sampler, sigmas, noise, latent, seed)
        bank = banks.bank_of(setup.cache)
        grid = TokenGrid.of_latent(tuple(noise.shape), tuple(guider.model_patcher.model.diffusion_model.patch_size))
        taps = Taps(grid, len(request.profile.conditioning))
        return Run(request, bank, policy_named(setup.policy), grid, taps, setup.donor, probe=setup.probe), ""
    except Undigestible as error:
        return None, f"passed through: {error}"
    except Exception as error:  # a bug of ours must not cost a user's run
        LOG.exception("Carnator could not begin; the run goes on without it")
        return None, f"passed through: an error of Carnator's own ({type(error).__name__}: {error})"


def _sample(executor: Any, guider: Any, setup: Setup, run: Run, args: tuple, more: dict) -> torch.Tensor:
    """The host's sampling with each prediction answered or observed."""
    from comfy.patcher_extension import WrappersMP, add_wrapper_with_key

    layers = len(guider.model_patcher.model.diffusion_model.blocks)

    def predict(inner: Any, x: torch.Tensor, timestep: torch.Tensor, options: dict | None = None, seed: Any = None):
        options = options or {}
        sigma = float(timestep.flatten()[0])

        def compute() -> torch.Tensor:
            probed = run.probing_last(sigma)
            return inner(x, timestep, tapped_options(options, run.taps, layers) if probed else options, seed)

        x0 = run.step(sigma, compute)
        events.send_step(setup, run)
        return x0.to(x.dtype) if x0.dtype != x.dtype else x0

    add_wrapper_with_key(WrappersMP.PREDICT_NOISE, KEY, predict, guider.model_options, is_model_options=True)
    try:
        return executor(*args, **more)
    finally:
        guider.model_options["transformer_options"]["wrappers"][WrappersMP.PREDICT_NOISE].pop(KEY, None)


def _finish(setup: Setup, run: Run, out: torch.Tensor) -> torch.Tensor:
    report = run.finish(out.detach().cpu())
    _tell(setup, out, report, run.evidence)
    return out


def _tell(setup: Setup, out: torch.Tensor, report: RunReport, evidence: Any = None) -> None:
    REPORTS.put(digest_of_tensor(out.float()), report, evidence)
    LOG.info(report.summary())
    events.send_report(setup, report)
