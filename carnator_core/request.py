"""A request: what must match exactly before anything is reused (identity), and what may differ (profile)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property

import torch

PARAMETRISATIONS = ("flow", "epsilon", "v")
SAMPLED_VALUES = 64  # values of every tensor that enter a digest of weights


def digest_of_tensor(tensor: torch.Tensor) -> str:
    """Digest of shape, dtype and every value."""
    data = tensor.detach().contiguous().cpu()
    h = hashlib.blake2b(f"{tuple(data.shape)}{data.dtype}".encode(), digest_size=16)
    h.update(data.flatten().view(torch.uint8).numpy().data)
    return h.hexdigest()


def digest_of_weights(tensors: Iterable[tuple[str, torch.Tensor]], full: bool = False) -> str:
    """Digest of names, shapes, dtypes and a fixed sample of values of every tensor (all values with `full`).

    The sample is `SAMPLED_VALUES` evenly spread values a tensor, so 14 B parameters take well under a second; two
    fine-tunes that differ in any usual way (a merge, another precision, a patch) differ in the sample.
    """
    h = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        for inner, part in _parts(name, tensor):
            h.update(f"{inner}{tuple(part.shape)}{part.dtype}".encode())
            if part.numel():
                h.update(_values(part.detach().as_subclass(torch.Tensor), full))
    return h.hexdigest()


def _parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensor itself, or what a wrapper around several (as of quantised weights) holds."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return [(name, tensor)]
    kind = type(tensor).__name__
    return [(f"{name}.{kind}.{inner}", getattr(tensor, inner)) for inner in tensor.__tensor_flatten__()[0]]


def _values(tensor: torch.Tensor, full: bool) -> bytes:
    """The sampled values' bytes; as bytes, because not every device can index every precision."""
    flat = tensor.reshape(-1).contiguous()
    rows = flat.view(torch.uint8).view(flat.numel(), -1)
    if not full and len(rows) > SAMPLED_VALUES:
        places = torch.linspace(0, len(rows) - 1, SAMPLED_VALUES, dtype=torch.float64).long()
        rows = rows[places.to(rows.device)]
    return rows.contiguous().cpu().numpy().tobytes()


def unpadded(rows: torch.Tensor) -> torch.Tensor:
    """Conditioning (L, C) without the zero rows behind the prompt; at least one row."""
    used = rows.abs().amax(-1) > 0
    return rows[: int(used.nonzero().max()) + 1 if used.any() else 1]


def begun_with(noise: str) -> str:
    """The noise itself, of a `Profile.noise`, without the latent that it was added to."""
    return noise.partition("+")[0]


def same_noise(one: str, other: str) -> bool:
    """Whether two runs (`Profile.noise`) began with the same noise, be it on different latents.

    The second part of a run in two parts goes on from what the first made, and that may be near the donor's.
    """
    return begun_with(one) == begun_with(other)


@dataclass(frozen=True)
class Identity:
    """All that must be equal between two requests before one may lend anything to the other."""

    weights: str  # digest_of_weights of the model and every patch with its strength
    latent_shape: tuple[int, ...]  # of the request's whole latent, batch included
    latent_dtype: str
    parametrisation: str  # one of PARAMETRISATIONS
    guidance: float
    negative: str = ""  # digest of the negative conditioning; "" without guidance
    extra: tuple[tuple[str, str], ...] = ()  # digests of further inputs by name, sorted

    def __post_init__(self) -> None:
        if self.parametrisation not in PARAMETRISATIONS:
            raise ValueError(f"parametrisation {self.parametrisation!r} is unknown; use one of {PARAMETRISATIONS}")

    @cached_property
    def digest(self) -> str:
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=16).hexdigest()

    def difference(self, other: Identity) -> str | None:
        """The first field that differs, in words for a report; None when all are equal."""
        for name, mine in asdict(self).items():
            theirs = asdict(other)[name]
            if mine != theirs:
                return name.replace("_", " ")
        return None

    @classmethod
    def from_json(cls, data: dict) -> Identity:
        return cls(
            **{
                **data,
                "latent_shape": tuple(data["latent_shape"]),
                "extra": tuple((str(k), str(v)) for k, v in data["extra"]),
            }
        )


@dataclass(frozen=True)
class Profile:
    """What may differ between a target and its donor."""

    conditioning: torch.Tensor = field(repr=False, compare=False)  # (L, C) rows of the positive prompt, unpadded
    noise: str  # digest of the initial noise; "+" and that of the latent below it where a run goes on from one
    sigmas: tuple[float, ...]  # descending, one more than steps, the last one usually 0
    sampler: str
    prompt: str = ""  # for people only; never decides anything
    seed: int | None = None  # for people only
    extra: tuple[tuple[str, str], ...] = ()  # digests of what else speaks of the prompt, by name

    @cached_property
    def digest(self) -> str:
        """Equal digests under one identity mean the same request: the stored result is its exact answer."""
        h = hashlib.blake2b(digest_size=16)
        h.update(digest_of_tensor(self.conditioning).encode())
        h.update(json.dumps([self.noise, [float(s).hex() for s in self.sigmas], self.sampler, *self.extra]).encode())
        return h.hexdigest()


@dataclass(frozen=True)
class Request:
    identity: Identity
    profile: Profile
