"""A ComfyUI run as a request: what its weights are, what it asks for, where it starts."""

from __future__ import annotations

import hashlib
import types
import weakref
from typing import Any

import torch

from ...carnator_core.request import (
    Identity,
    Profile,
    Request,
    begun_with,
    digest_of_tensor,
    digest_of_weights,
    unpadded,
)
from .families import Family, family_of
from .setup import ORIGINS, digest_of_latent
from .supported import sampler_name

_BASE: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # digests, kept with the model object
_PATCHES: dict[Any, str] = {}  # by patches_uuid, which ComfyUI renews with every change
_PATCHES_KEPT = 64
PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
DEEPEST = 4  # functions within functions whose code is read


class Undigestible(ValueError):
    """A patch whose content cannot be read, so that nothing can be known to be equal."""


def _unpatched(patcher: Any) -> list[tuple[str, torch.Tensor]]:
    """The model's own weights, also while patches lie on them; its noise levels, which nodes replace, told apart.

    Loaders of quantised weights (GGUF) put empty stand-ins into the state dict; their parameters hold the data.
    """
    backup, state, parameters = patcher.backup, patcher.model.state_dict(), dict(patcher.model.named_parameters())
    found = [
        (name, backup[name].weight if name in backup else parameters.get(name, tensor) if tensor.is_meta else tensor)
        for name, tensor in state.items()
        if not name.startswith("model_sampling.")
    ]
    empty = next((name for name, tensor in found if tensor.is_meta), None)
    if empty:
        raise Undigestible(f"the weight {empty} holds no data that could be read")
    return found


def _feed(digest: Any, value: Any) -> None:
    """Content of a patch: numbers, names, tensors (sampled), and adapters by their weights."""
    if isinstance(value, torch.Tensor):
        digest.update(digest_of_weights([("", value)]).encode())
    elif isinstance(value, (list, tuple)):
        digest.update(f"{type(value).__name__}{len(value)}".encode())
        for part in value:
            _feed(digest, part)
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif value is None or isinstance(value, (bool, int, float, str)):
        digest.update(f"{type(value).__name__}{value!r}".encode())
    elif hasattr(value, "weights"):  # comfy.weight_adapter: LoRA, LoHa and their kind
        digest.update(type(value).__name__.encode())
        _feed(digest, value.weights)
    else:
        raise Undigestible(f"a patch of the kind {type(value).__name__} cannot be read")


def _patches(patcher: Any) -> str:
    if patcher.patches_uuid not in _PATCHES:
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(patcher.patches):
            digest.update(str(name).encode())
            _feed(digest, patcher.patches[name])
        if len(_PATCHES) >= _PATCHES_KEPT:
            _PATCHES.clear()
        _PATCHES[patcher.patches_uuid] = digest.hexdigest()
    return _PATCHES[patcher.patches_uuid]


def weights_of(patcher: Any) -> str:
    """Digest of the base weights and of every patch with its strength; `Undigestible` for what cannot be read."""
    model = patcher.model
    if model not in _BASE:
        _BASE[model] = digest_of_weights(_unpatched(patcher))
    return hashlib.blake2b(f"{_BASE[model]}{_patches(patcher)}".encode(), digest_size=16).hexdigest()


def _sampling(patcher: Any) -> str:
    """How noise levels become the model's timesteps."""
    found = patcher.get_model_object("model_sampling")
    numbers = {k: v for k, v in sorted(vars(found).items()) if isinstance(v, (int, float, str))}
    return f"{[c.__name__ for c in type(found).__mro__]} {numbers}"


def attention_of(options: dict) -> str:
    """Digest of the attention that another node put in the host's place (SageAttention and the like); "" for none.

    `Undigestible` where it carries anything but plain values and functions.
    """
    override = options.get("transformer_options", {}).get("optimized_attention_override")
    if override is None:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    _feed_function(digest, override, 0)
    return digest.hexdigest()


def _feed_function(digest: Any, value: Any, depth: int) -> None:
    """Code, constants and closure of a function, so that two modes of one node differ."""
    if isinstance(value, PLAIN):
        digest.update(f"{type(value).__name__}{value!r}".encode())
    elif isinstance(value, (tuple, frozenset)):
        for part in value if isinstance(value, tuple) else sorted(value, key=repr):
            _feed_function(digest, part, depth)
    elif isinstance(value, types.ModuleType):
        digest.update(value.__name__.encode())
    elif isinstance(value, types.CodeType):
        digest.update(value.co_code)
        _feed_function(digest, (value.co_names, value.co_consts), depth)
    elif isinstance(value, types.FunctionType) and depth < DEEPEST:
        digest.update(f"{value.__module__}.{value.__qualname__}".encode())
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        wrapped = getattr(value, "__wrapped__", None)
        for part in (value.__code__, value.__defaults__, cells, wrapped):
            _feed_function(digest, part, depth + 1)
    elif callable(value) and getattr(value, "__qualname__", None):  # compiled functions, classes, what lies too deep
        digest.update(f"{value.__module__}.{value.__qualname__}".encode())
    else:
        raise Undigestible(f"the attention that another node sets holds a {type(value).__name__}, which cannot be read")


def rows_of(cond: dict) -> torch.Tensor:
    """Text rows (L, C), without padding: zero rows behind the prompt, or those that the attention mask hides."""
    rows, mask = cond["cross_attn"][0].detach().float().cpu(), cond.get("attention_mask")
    if mask is not None and mask.numel() == len(rows):
        seen = mask.detach().cpu().flatten().bool()
        rows = rows * seen[:, None]
    return unpadded(rows)


def _beside(family: Family, cond: dict) -> tuple[tuple[str, str], ...]:
    """Digests of what speaks of the prompt beside its rows."""
    return tuple((name, digest_of_tensor(cond[name])) for name in family.prompt if cond.get(name) is not None)


def _negative(family: Family, cond: dict) -> str:
    """Digest of a negative conditioning; its rows' alone where nothing lies beside them."""
    rows, beside = digest_of_tensor(rows_of(cond)), _beside(family, cond)
    return f"{rows} {beside}" if beside else rows


def _settings(family: Family, conds: dict) -> tuple[tuple[str, str], ...]:
    """Numbers of every conditioning that must be equal; None is what a node sets that switches one off."""
    found = (
        (f"{side} {name}", parts[0].get(name, usual))
        for name, usual in family.settings
        for side, parts in sorted(conds.items())
    )
    return tuple((name, repr(value if value is None else float(value))) for name, value in found)


def _noise_of(noise: torch.Tensor, latent: torch.Tensor) -> str:
    """`Profile.noise`. The second part of a run in two parts adds no noise; its latent holds the first part's.

    Where the first part is not known the latent stands for its noise, so that only runs from the very same latent have
    it in common: predictions late in a schedule are too much alike to tell other noise by them.
    """
    if not torch.count_nonzero(latent):
        return digest_of_tensor(noise)
    start = digest_of_latent(latent)
    own = digest_of_tensor(noise) if torch.count_nonzero(noise) else begun_with(ORIGINS.get(start) or start)
    return f"{own}+{start}"


def of_unknown_noise(request: Request) -> bool:
    """Whether a run goes on from a latent whose noise is not known."""
    own, _, start = request.profile.noise.partition("+")
    return own == start


def request_of(guider: Any, sampler: Any, sigmas: torch.Tensor, noise: torch.Tensor, latent: torch.Tensor, seed: Any):
    """The request of a run whose support was checked before."""
    patcher = guider.model_patcher
    family = family_of(patcher.model)
    guidance = float(guider.cfg) if "negative" in guider.conds else 1.0
    forced = bool(guider.model_options.get("disable_cfg1_optimization"))
    options = sorted((str(k), str(v)) for k, v in getattr(sampler, "extra_options", {}).items())
    inpaint = sorted((str(k), str(v)) for k, v in getattr(sampler, "inpaint_options", {}).items())
    identity = Identity(
        weights=weights_of(patcher),
        latent_shape=tuple(noise.shape),
        latent_dtype=str(noise.dtype).removeprefix("torch."),
        parametrisation="flow",
        guidance=guidance,
        negative=_negative(family, guider.conds["negative"][0]) if guidance != 1 or forced else "",
        extra=(
            *_settings(family, guider.conds),
            *((("attention", attention),) if (attention := attention_of(guider.model_options)) else ()),
            ("compute dtype", str(patcher.model_dtype())),
            ("model kind", type(patcher.model).__name__),
            ("model sampling", _sampling(patcher)),
        ),
    )
    profile = Profile(
        conditioning=rows_of(guider.conds["positive"][0]),
        noise=_noise_of(noise, latent),
        sigmas=tuple(float(s) for s in sigmas),
        sampler=f"{sampler_name(sampler)} {options} {inpaint}",
        seed=seed if isinstance(seed, int) else None,
        extra=_beside(family, guider.conds["positive"][0]),
    )
    return Request(identity, profile)
