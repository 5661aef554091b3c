"""`attach(pipe, bank=...)`: a diffusers Wan pipeline that reuses.

    fast = attach(pipe, bank=Bank("carnator"))
    clip = fast("a red ball rolls over a meadow", generator=torch.Generator().manual_seed(7))
    print(fast.report.summary())

The pipeline's own loop runs: a skipped step answers its transformer calls with the velocity that stands for the x0
prediction (the same one for both guidance branches, so guidance leaves it alone). `pipe` itself is untouched:
called directly it runs without Carnator. What is not known to work is passed through, with the reason in the report.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import backbones
from ..attention.connectivity import Connectivity
from ..bank import Bank
from ..gate.policy import DEFAULT, policy_named
from ..report import RunReport
from ..request import Identity, Profile, Request, digest_of_tensor, digest_of_weights, unpadded
from ..reuse.engine import Run
from ..reuse.window import TokenWindow
from ..schedule import from_x0, to_x0
from ..signature.taps import Taps
from .first_block import FirstBlockWatch, composes


def attach(pipe: Any, bank: Bank, policy: str = DEFAULT, kept: float | None = None) -> Attached:
    """Wrap a diffusers text-to-video pipeline. ValueError for an unknown policy; unknown pipelines pass through.

    `kept`: attention mass in (0, 1] that hits keep (0.95 is a good value), sparse where that measures faster; None for
    dense attention.
    """
    return Attached(pipe, bank, policy, kept)


class Attached:
    """Callable like the pipeline it wraps; `report` tells of the last call."""

    def __init__(self, pipe: Any, bank: Bank, policy: str = DEFAULT, kept: float | None = None):
        self.pipe, self.bank, self.policy, self.kept = pipe, bank, policy_named(policy), kept
        self.report: RunReport | None = None
        self._weights: tuple[tuple, str] | None = None

    def __call__(self, *args: Any, donor: str | None = None, **kwargs: Any) -> Any:
        """Run the pipeline. `donor`: borrow from this entry only (an id from a report). All else is the pipeline's."""
        given = inspect.signature(self.pipe.__call__).bind(*args, **kwargs).arguments
        reason = self.unsupported() or _unsupported_call(given)
        if reason:
            self.report = RunReport(decision="off", reason=f"passed through: {reason}")
            return self.pipe(*args, **kwargs)
        given.update(_conditioning(self.pipe, given))
        drive = _Drive(self, donor, given)
        transformer = self.pipe.transformer
        before = transformer.__dict__.get("forward")
        drive.forward = transformer.forward
        transformer.forward = drive.call
        try:
            out = self.pipe(**given)
        except BaseException as error:
            self.report = drive.abort(type(error).__name__)
            raise
        finally:
            if before is None:
                del transformer.forward
            else:
                transformer.forward = before
        self.report = drive.finish()
        return out

    def unsupported(self) -> str | None:
        """Why this pipeline is passed through; None when it is supported."""
        if type(self.pipe).__name__ not in backbones.PIPELINES:
            return f"{type(self.pipe).__name__} is not known; known are {', '.join(backbones.PIPELINES)}"
        if getattr(self.pipe, "transformer_2", None) is not None:
            return "two transformers share the schedule (Wan 2.2 14B), which is not supported yet"
        if backbones.find(self.pipe.transformer) is None:
            return f"the transformer {type(self.pipe.transformer).__name__} is not known"
        if getattr(self.pipe.scheduler.config, "prediction_type", "flow_prediction") != "flow_prediction":
            return "the scheduler does not predict a flow"
        # What changes the transformer's answers without changing its parameters is in no digest of them.
        if getattr(self.pipe.transformer, "peft_config", None):
            return "a LoRA lies on the transformer unfused, and its strength cannot be read; fuse it"
        if not composes(self.pipe.transformer):
            return "a cache of diffusers is enabled on the transformer, and only its first-block cache is known"
        return None

    def weights(self) -> str:
        """Digest of the transformer's weights, kept while the same tensors hold the same data."""
        named = list(self.pipe.transformer.named_parameters())
        stamp = tuple((p.data_ptr(), p._version) for _, p in named)
        if self._weights is None or self._weights[0] != stamp:
            self._weights = (stamp, digest_of_weights(named))
        return self._weights[1]


def _unsupported_call(given: dict[str, Any]) -> str | None:
    """Why a call with these arguments is passed through; None when it is supported."""
    prompt, embeds = given.get("prompt"), given.get("prompt_embeds")
    clips = len(prompt) if isinstance(prompt, list) else 1 if embeds is None else len(embeds)
    if clips * (given.get("num_videos_per_prompt") or 1) != 1:
        return "several clips at once are not supported yet"
    if given.get("attention_kwargs"):
        return "attention_kwargs change the transformer in a way that is not known"
    return None


@torch.no_grad()  # as the pipeline's own call: with gradients other kernels run, and bits differ
def _conditioning(pipe: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that replace the prompts by their embeddings, made by the pipeline itself, once."""
    length = inspect.signature(pipe.__call__).parameters["max_sequence_length"].default
    guidance = given.get("guidance_scale", inspect.signature(pipe.__call__).parameters["guidance_scale"].default)
    cond, uncond = pipe.encode_prompt(
        prompt=given.get("prompt"),
        negative_prompt=given.get("negative_prompt"),
        do_classifier_free_guidance=guidance > 1,
        num_videos_per_prompt=1,
        prompt_embeds=given.get("prompt_embeds"),
        negative_prompt_embeds=given.get("negative_prompt_embeds"),
        max_sequence_length=given.get("max_sequence_length", length),
        device=pipe._execution_device,
    )
    return {"prompt": None, "negative_prompt": None, "prompt_embeds": cond, "negative_prompt_embeds": uncond}


def _sampler_name(scheduler: Any) -> str:
    """The scheduler with every setting of its own, so that equal names mean equal steps."""
    config = {k: v for k, v in sorted(dict(scheduler.config).items()) if not k.startswith("_")}
    return f"{type(scheduler).__name__} {json.dumps(config, default=str)}"


@dataclass
class _Step:
    """The transformer calls of one step."""

    x: torch.Tensor
    sigma: float
    started: float
    branches: list[torch.Tensor] = field(default_factory=list)
    answered: torch.Tensor | None = None  # the velocity given instead of the model's
    window: TokenWindow | None = None


class _Drive:
    """One call of the pipeline: turns its transformer calls into steps of a `Run`."""

    def __init__(self, attached: Attached, donor: str | None, given: dict[str, Any]):
        self.attached, self.donor = attached, donor
        self.prompts = (given["prompt_embeds"], given["negative_prompt_embeds"])
        self.callback: Callable | None = given.get("callback_on_step_end")
        self.wanted = list(given.get("callback_on_step_end_tensor_inputs", ["latents"]))
        given["callback_on_step_end"] = self.step_ended
        given["callback_on_step_end_tensor_inputs"] = sorted({*self.wanted, "latents"})
        self.forward: Callable = _nothing
        self.run: Run | None = None
        self.stored: torch.Tensor | None = None
        self.result: torch.Tensor | None = None
        self.step: _Step | None = None
        self.cache = FirstBlockWatch(attached.pipe.transformer)
        self.sparse = Connectivity(attached.kept) if attached.kept else None
        self.applied = 0  # sparse attentions of the steps before

    # --- the transformer's side ---

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """In place of `transformer.forward` while the pipeline runs."""
        if args or not {"hidden_states", "timestep"} <= set(kwargs):
            return self.forward(*args, **kwargs)
        x = kwargs["hidden_states"]
        if self.run is None:
            self._begin(x)
        if self.stored is not None:
            return (torch.zeros_like(x),)
        if self.step is None:
            self._open_step(x, kwargs["timestep"])
        if self.step.answered is not None:
            return (self.step.answered,)
        with self._tapped(), self._stood_in(), self.cache.around():
            out = self.forward(**kwargs)
        velocity = self._blended(out[0])
        self.step.branches.append(velocity)
        return out if velocity is out[0] else (velocity,)

    def _begin(self, x: torch.Tensor) -> None:
        pipe, attached = self.attached.pipe, self.attached
        grid = backbones.find(pipe.transformer).grid_of(pipe.transformer, tuple(x.shape))
        request = self._request(x)
        taps = Taps(grid, len(request.profile.conditioning))
        self.run = Run(request, attached.bank, attached.policy, grid, taps, self.donor, layers=self.cache.layers)
        self.stored = self.run.exact()
        if self.stored is None:
            self.sparse = self.cache.beside(self.sparse, self.run)

    def _request(self, x: torch.Tensor) -> Request:
        pipe, (cond, uncond) = self.attached.pipe, self.prompts
        guided = pipe.do_classifier_free_guidance
        identity = Identity(
            weights=self.attached.weights(),
            latent_shape=tuple(x.shape),
            latent_dtype=str(x.dtype).removeprefix("torch."),
            parametrisation="flow",
            guidance=float(pipe.guidance_scale) if guided else 1.0,
            negative=digest_of_tensor(unpadded(uncond[0])) if guided else "",
        )
        profile = Profile(
            conditioning=unpadded(cond[0]).detach(),
            noise=digest_of_tensor(x),
            sigmas=tuple(float(s) for s in pipe.scheduler.sigmas),
            sampler=_sampler_name(pipe.scheduler),
        )
        return Request(identity, profile)

    def _open_step(self, x: torch.Tensor, timestep: torch.Tensor) -> None:
        told = float(timestep.flatten()[0]) / self.attached.pipe.scheduler.config.num_train_timesteps
        sigma = min(self.run.sigmas, key=lambda level: abs(level - told))  # some schedulers round their timesteps
        self.step = _Step(x, sigma, time.perf_counter())
        answer = self.run.answer(sigma)
        if answer is not None:
            self.step.answered = from_x0("flow", x.float(), answer.float(), sigma)

    def _tapped(self) -> AbstractContextManager:
        """Taps on the conditional branch (the first of a step) of the probe's last step."""
        last = self.run.probe - 1
        if self.step.branches or self.step.sigma != self.run.sigmas[last] or self.attached.bank.mode == "off":
            return nullcontext()
        transformer = self.attached.pipe.transformer
        return backbones.find(transformer).tapped(transformer, self.run.taps)

    def _stood_in(self) -> AbstractContextManager:
        """The transformer's blocks through the run's window, where it has one at this step, and attention in our hands:
        its masks are read at the probe's last step and used where the run allows it."""
        transformer, backbone = self.attached.pipe.transformer, backbones.find(self.attached.pipe.transformer)
        if not self.step.branches:  # once a step: its forwards are told apart by their order
            self.step.window = self.run.window_at(self.step.sigma)
        recording, attend = self.run.probing_last(self.step.sigma), None
        if self.sparse is not None and (recording or self.run.may_be_sparse(self.step.sigma)):
            attend = self.sparse.stand_in((len(self.step.branches),), recording)  # conditional first
        if self.step.window:
            return backbone.windowed(transformer, self.step.window, attend)
        return backbone.attending(transformer, attend) if attend else nullcontext()

    def _blended(self, velocity: torch.Tensor) -> torch.Tensor:
        """One guidance branch's velocity, blended with the answer where only a region was computed."""
        step = self.step
        if not self.run.region_planned(step.sigma):
            return velocity
        x0 = to_x0("flow", step.x.float(), velocity.float(), step.sigma)
        return from_x0("flow", step.x.float(), self.run.blended(step.sigma, x0), step.sigma).to(velocity.dtype)

    # --- the loop's side ---

    def step_ended(self, pipe: Any, index: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict:
        """The pipeline's callback: closes the step, hands over a stored result at the end, calls the user's own."""
        self._close_step()
        out: dict[str, torch.Tensor] = {}
        if index == pipe.num_timesteps - 1:
            if self.stored is not None:
                out["latents"] = self.stored.to(tensors["latents"].device)
            self.result = out.get("latents", tensors["latents"])
        if self.callback is not None:
            changed = self.callback(pipe, index, timestep, {n: tensors[n] for n in self.wanted} | out) or {}
            if changed and self.run:
                self.run.stop("a callback changed the run")
            out |= changed
        return out

    def _close_step(self) -> None:
        step, self.step = self.step, None
        if step is None or step.answered is not None or not step.branches:
            return
        velocity = step.branches[0]
        if len(step.branches) == 2:
            velocity = step.branches[1] + self.run.request.identity.guidance * (step.branches[0] - step.branches[1])
            if step.sigma == self.run.sigmas[self.run.probe - 1]:
                self.run.taps.read_branches(*step.branches)
        x0 = to_x0("flow", step.x.float(), velocity.float(), step.sigma)
        self.run.observe(step.sigma, x0, time.perf_counter() - step.started)
        self.cache.tell(self.run)
        if self.sparse and self.run.probing_last(step.sigma):
            self.sparse.close()
        if self.sparse and self.sparse.applied > self.applied:
            self.run.was_sparse(self.sparse.density)
            self.applied = self.sparse.applied

    # --- ends ---

    def finish(self) -> RunReport:
        if self.run is None:
            return RunReport(decision="off", reason="passed through: the transformer was never called as expected")
        if self.sparse and self.stored is None:
            self.run.report.scope.density = self.sparse.density
            self.run.report.warnings.append(self.sparse.told(self.run.becomes_donor))
        return self.run.finish(self.result)

    def abort(self, reason: str) -> RunReport:
        if self.run is None:
            return RunReport(decision="off", reason=f"the run did not end: {reason}")
        return self.run.abort(reason)


def _nothing(*_: Any, **__: Any) -> None:
    raise RuntimeError("the pipeline's transformer was not yet handed over")
