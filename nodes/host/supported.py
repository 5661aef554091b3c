"""What the pack knows how to handle in ComfyUI. Everything else is passed through, with the sentence given here."""

from __future__ import annotations

from typing import Any

import torch

from .families import family_of, names
from .setup import KEY

GUIDERS = ("CFGGuider", "Guider_Basic")
SAMPLERS = (  # deterministic, one call a step, at the levels of the schedule
    "sample_euler",
    "sample_dpmpp_2m",
    "sample_unipc",
    "sample_unipc_bh2",
    "sample_res_multistep",
    "sample_deis",
    "sample_ipndm",
    "sample_lms",
)
CONDITIONING = {"cross_attn", "model_conds", "uuid", "pooled_output"}  # of every family, beside its own
OPTIONS = {"transformer_options", "to_load_options", "registered_hooks", "disable_cfg1_optimization"}
TRANSFORMER_OPTIONS = {  # the override: another attention kernel, which ours goes through
    "wrappers",
    "callbacks",
    "patches",
    "patches_replace",
    "sample_sigmas",
    "optimized_attention_override",
}
OBJECT_PATCHES = {"model_sampling"}


def unsupported(guider: Any, sampler: Any, sigmas: torch.Tensor, latent: torch.Tensor, mask: Any) -> str | None:
    """Why a run is passed through; None when it is supported."""
    return (
        _model(guider)
        or _sampler(sampler)
        or _latent(latent, mask, sigmas)
        or _conditioning(guider)
        or _patches(guider.model_patcher, guider.model_options)
    )


def _model(guider: Any) -> str | None:
    model = guider.model_patcher.model
    family = family_of(model)
    if family is None:
        return f"the model is of the kind {type(model).__name__}; known are the text-to-video models of {names()}"
    if not family.latent_alone(model.diffusion_model):
        return "the model takes a picture or a control video beside the latent, which is not supported yet"
    if type(guider).__name__ not in GUIDERS:
        return f"the guider {type(guider).__name__} combines predictions in its own way"
    return None


def sampler_name(sampler: Any) -> str:
    return getattr(getattr(sampler, "sampler_function", None), "__name__", type(sampler).__name__)


def _sampler(sampler: Any) -> str | None:
    name = sampler_name(sampler)
    if name not in SAMPLERS:
        return f"the sampler {name.removeprefix('sample_')} is random or calls the model several times a step"
    for option, value in getattr(sampler, "extra_options", {}).items():
        if option in ("s_churn", "eta") and value != 0:
            return f"the sampler's option {option} makes it random"
    return None


def _latent(latent: torch.Tensor, mask: Any, sigmas: torch.Tensor) -> str | None:
    if getattr(latent, "is_nested", False) or latent.ndim != 5:
        return "the latent is not a video latent of five dimensions"
    if mask is not None:
        return "a noise mask keeps a part of the latent, which is not supported yet"
    if len(sigmas) < 2 or bool((sigmas[:-1] <= sigmas[1:]).any()):
        return "the noise levels do not descend"
    return None


def _conditioning(guider: Any) -> str | None:
    family = family_of(guider.model_patcher.model)
    known = CONDITIONING | {name for name, _ in family.settings} | set(family.prompt)
    for name, conds in guider.conds.items():
        if len(conds) != 1:
            return f"the {name} conditioning holds {len(conds)} parts"
        strange = {k for k, v in conds[0].items() if k not in known and v is not None}
        if strange:
            return f"the {name} conditioning carries {', '.join(sorted(strange))}"
        if conds[0].get("cross_attn") is None or conds[0]["cross_attn"].shape[0] != 1:
            return f"the {name} conditioning has no single text embedding"
    return None if "positive" in guider.conds else "there is no positive conditioning"


def _patches(patcher: Any, options: dict) -> str | None:
    """Anything on the model that changes its answers in a way a digest of weights does not see."""
    strange = sorted(set(options) - OPTIONS)
    if strange:
        return f"another node changes sampling ({', '.join(strange)})"
    inner = options.get("transformer_options", {})
    strange = sorted(k for k in set(inner) - TRANSFORMER_OPTIONS if inner[k] is not None)
    if strange:
        return f"another node changes the model ({', '.join(strange)})"
    for name in ("patches", "patches_replace"):
        if any(inner.get(name, {}).values()):
            return f"another node patches the model's blocks ({', '.join(inner[name])})"
    for kind, keyed in inner.get("wrappers", {}).items():
        others = [str(key) for key, found in keyed.items() if found and key != KEY]
        if others:
            return f"another node wraps {kind} ({', '.join(others)})"
    strange = sorted(set(patcher.object_patches) - OBJECT_PATCHES)
    if strange:
        return f"another node replaces parts of the model ({', '.join(strange)})"
    if patcher.hook_patches:
        return "hooks change the weights during the run"
    return None
