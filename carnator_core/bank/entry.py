"""The format of one entry: what is written, and every check made before anything read is believed.

entry.json                 schema, id, identity, profile, provenance, sizes, checksums; checks itself
signature.safetensors      the Early Signature's tensors, and the text vector under `bank.text`
predictions.safetensors    guided x0 predictions (S, *latent) as `packing` keeps them, their sigmas in float64
result.safetensors         the final latent, bit for bit
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from .. import __version__
from ..request import Identity, Request
from . import packing
from .text import DIMENSIONS, text_vector

SCHEMA = 2
MANIFEST = "entry.json"
SIGNATURE, PREDICTIONS, RESULT = "signature.safetensors", "predictions.safetensors", "result.safetensors"
PARTS = (SIGNATURE, PREDICTIONS, RESULT)
TEXT = "bank.text"
MANIFEST_LIMIT = 4 * 2**20  # bytes; a real one has some KB
# A run with borrowed masks is left out too: its attention was the donor's, not its own.
DONOR_DECISIONS = ("miss", "off")


class BadEntry(ValueError):
    """An entry on disk that cannot be believed; says why."""


class Refused(ValueError):
    """A draft that must not become a donor, or does not fit; says why."""


@dataclass
class EntryDraft:
    """A run that may become a donor.

    `predictions` is (S, *latent) at `prediction_sigmas`, which descend strictly. `provenance` is plain JSON data with
    computed=True (every prediction came from the model itself), decision, steps, dense_seconds.
    """

    request: Request
    signature: Mapping[str, torch.Tensor]
    predictions: torch.Tensor
    prediction_sigmas: Sequence[float]
    result: torch.Tensor
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EntryInfo:
    """What is known of an entry without its tensors. Times are seconds since 1970, sizes bytes."""

    id: str
    identity: Identity
    profile_digest: str
    prompt: str
    seed: int | None
    noise: str
    sigmas: tuple[float, ...]
    sampler: str
    prediction_sigmas: tuple[float, ...]
    provenance: dict[str, Any]
    created: float
    carnator: str
    dense_seconds: float
    bytes: int
    uses: int = 0
    last_used: float = 0.0
    saved_seconds: float = 0.0
    similarity: float | None = None  # cosine to the request's text, in recall only

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Sealed:
    """An entry ready to be written: file names and their bytes."""

    id: str
    files: dict[str, bytes]
    manifest: dict[str, Any]
    vector: np.ndarray

    @property
    def bytes(self) -> int:
        return sum(len(data) for data in self.files.values())


def entry_id(request: Request) -> str:
    """The one id of a request: 32 hexadecimal digits from the digests of identity and profile."""
    return _id_of(request.identity.digest, request.profile.digest)


def _id_of(identity_digest: str, profile_digest: str) -> str:
    return hashlib.blake2b(f"{identity_digest}{profile_digest}".encode(), digest_size=16).hexdigest()


def checksum(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _seal_of(manifest: Mapping[str, Any]) -> str:
    """Checksum of a manifest's own content."""
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return checksum(json.dumps(rest, sort_keys=True, allow_nan=False).encode())


# --- writing ---


def draft_bytes(draft: EntryDraft) -> int:
    """Bytes the tensors of a draft take at least, before anything is packed."""
    whole = [*draft.signature.values(), draft.result]
    return 2 * math.prod(draft.predictions.shape[1:]) + sum(t.numel() * t.element_size() for t in whole)


# The bits of a float without its sign, as a whole number, are below these exactly when it is finite.
_INFINITY = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
}


def _finite(tensor: torch.Tensor) -> bool:
    """Whether every value is finite. By bits and in numpy: torch's isfinite takes ten times as long in 16 bits, and
    parallel work on small tensors waits for its threads longer than it works."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.dtype not in _INFINITY:
        return bool(torch.isfinite(tensor.float()).all())  # float8 knows no isfinite of its own
    whole, infinity = _INFINITY[tensor.dtype]
    bits = tensor.detach().cpu().contiguous().view(whole).numpy()
    return int((bits & np.iinfo(bits.dtype).max).max()) < infinity


def check_draft(draft: EntryDraft) -> None:
    """Raises Refused for a draft that is no donor: reused, non-finite, or not of its request's shape."""
    provenance, shape = draft.provenance, tuple(draft.request.identity.latent_shape)
    if provenance.get("computed") is not True:
        raise Refused("a reused trajectory never becomes a donor: provenance does not say computed=True")
    if provenance.get("decision") not in DONOR_DECISIONS:
        raise Refused(f"decision {provenance.get('decision')!r} makes no donor; only {DONOR_DECISIONS} do")
    if tuple(draft.predictions.shape[1:]) != shape or tuple(draft.result.shape) != shape:
        found = f"predictions {tuple(draft.predictions.shape)}, result {tuple(draft.result.shape)}"
        raise Refused(f"{found} do not fit the identity's latent shape {shape}")
    if not draft.predictions.is_floating_point():
        raise Refused(f"predictions must be floating point, not {draft.predictions.dtype}")
    _check_sigmas(draft.prediction_sigmas, len(draft.predictions), Refused)
    if TEXT in draft.signature:
        raise Refused(f"the name {TEXT!r} is the bank's own; rename this signature tensor")
    for name, tensor in {**draft.signature, "predictions": draft.predictions, "result": draft.result}.items():
        if not _finite(tensor):
            raise Refused(f"{name} holds non-finite values; the run collapsed and is no donor")


def _check_sigmas(sigmas: Sequence[float], count: int, error: type[ValueError]) -> None:
    if len(sigmas) != count or not count:
        raise error(f"{len(sigmas)} noise levels for {count} predictions; every prediction needs one")
    if not all(math.isfinite(s) and s >= 0 for s in sigmas):
        raise error("noise levels of predictions must be finite and not negative")
    if any(a <= b for a, b in zip(sigmas[:-1], sigmas[1:], strict=True)):
        raise error("noise levels of predictions must descend strictly")


def _halved(predictions: torch.Tensor) -> torch.Tensor:
    """Predictions in 16 bits: float16 resolves more, bfloat16 only where values leave its range."""
    data = predictions.detach()
    if data.dtype not in (torch.float16, torch.bfloat16):
        small = data.numel() == 0 or float(data.abs().max()) < 6e4
        data = data.to(torch.float16 if small else torch.bfloat16)
    data = data.cpu().contiguous()
    if not _finite(data):
        raise Refused("predictions leave the range of 16 bits; the run collapsed and is no donor")
    return data


def _own(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies that share no memory, as safetensors demands."""
    return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}


def _spec(tensors: Mapping[str, torch.Tensor]) -> dict[str, list]:
    return {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}


def _groups(draft: EntryDraft, vector: np.ndarray) -> dict[str, dict[str, torch.Tensor]]:
    sigmas = torch.tensor([float(s) for s in draft.prediction_sigmas], dtype=torch.float64)
    return {
        SIGNATURE: {**_own(draft.signature), TEXT: torch.from_numpy(vector)},
        PREDICTIONS: {**packing.pack(_halved(draft.predictions)), "sigmas": sigmas},
        RESULT: {"result": draft.result.detach().cpu().contiguous()},
    }


def as_lent(predictions: torch.Tensor) -> torch.Tensor:
    """What a reader of an entry gets of one run's predictions (S, *latent): 16 bits, packed and unpacked."""
    return packing.unpack(packing.pack(_halved(predictions)))


def _seconds(value: Any) -> float:
    """A duration; 0 for what is none, which makes the entry the first to go."""
    known = isinstance(value, (int, float)) and math.isfinite(value) and value > 0
    return float(value) if known else 0.0


def seal(draft: EntryDraft) -> Sealed:
    """A checked draft as bytes. Raises Refused when its provenance is no JSON or its values do not fit."""
    request, identity = draft.request, draft.request.identity
    try:
        vector = text_vector(request.profile.conditioning)
    except ValueError as error:
        raise Refused(str(error)) from error
    groups = _groups(draft, vector)
    files = {name: save_tensors(tensors) for name, tensors in groups.items()}
    profile = request.profile
    manifest = {
        "schema": SCHEMA,
        "id": entry_id(request),
        "identity": asdict(identity),
        "profile": {
            "digest": profile.digest,
            "noise": profile.noise,
            "sigmas": [float(s) for s in profile.sigmas],
            "sampler": profile.sampler,
            "prompt": profile.prompt,
            "seed": profile.seed,
        },
        "provenance": dict(draft.provenance),
        "created": time.time(),
        "carnator": __version__,
        "dense_seconds": _seconds(draft.provenance.get("dense_seconds")),
        "prediction_sigmas": [float(s) for s in draft.prediction_sigmas],
        "files": {
            name: {"bytes": len(files[name]), "checksum": checksum(files[name]), "tensors": _spec(tensors)}
            for name, tensors in groups.items()
        },
    }
    try:
        manifest = json.loads(json.dumps(manifest, allow_nan=False))  # as a reader will see it
        manifest["checksum"] = _seal_of(manifest)
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused(f"identity, profile and provenance must be plain finite JSON data: {error}") from error
    files[MANIFEST] = json.dumps(manifest, indent=1).encode()
    return Sealed(manifest["id"], files, manifest, vector)


# --- reading ---


def read_manifest(folder: Path, entry_id: str) -> dict[str, Any]:
    """entry.json after every check that needs no tensor. Raises BadEntry; FileNotFoundError when the entry is gone."""
    manifest = _parse(folder)
    try:
        _check_manifest(manifest, entry_id)
        info_of(manifest, 0)
        for name, record in manifest["files"].items():
            size = (folder / name).stat().st_size
            if size != record["bytes"]:
                raise BadEntry(f"{name} has {size} bytes instead of {record['bytes']}")
    except FileNotFoundError as error:
        raise _missing(folder, error) from error
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise BadEntry(f"{MANIFEST} is not of schema {SCHEMA}: {error!r}") from error
    return manifest


def _missing(folder: Path, error: FileNotFoundError) -> Exception:
    """A file that is missing from a present entry makes it bad; a whole entry that left is just gone."""
    return BadEntry(f"{Path(str(error.filename)).name} is missing") if folder.is_dir() else error


def _read(folder: Path, name: str, limit: int) -> bytes:
    """At most limit + 1 bytes, so that a longer file is noticed and never loaded whole."""
    try:
        with open(folder / name, "rb") as file:
            return file.read(limit + 1)
    except IsADirectoryError as error:
        raise BadEntry(f"{name} is a folder") from error
    except FileNotFoundError as error:
        raise _missing(folder, error) from error


def _parse(folder: Path) -> dict[str, Any]:
    data = _read(folder, MANIFEST, MANIFEST_LIMIT)
    if len(data) > MANIFEST_LIMIT:
        raise BadEntry(f"{MANIFEST} is larger than {MANIFEST_LIMIT} bytes")
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadEntry(f"{MANIFEST} is no JSON: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("schema"), int):
        raise BadEntry(f"{MANIFEST} names no schema")
    if manifest["schema"] != SCHEMA:
        raise BadEntry(f"schema {manifest['schema']} is not {SCHEMA}; another version of Carnator wrote this entry")
    return manifest


def _need(fact: bool, otherwise: str) -> None:
    if not fact:
        raise BadEntry(otherwise)


def _check_manifest(manifest: dict[str, Any], entry_id: str) -> None:
    _need(manifest["checksum"] == _seal_of(manifest), f"{MANIFEST} was altered: its checksum does not match")
    try:
        identity = Identity.from_json(manifest["identity"])
    except ValueError as error:
        raise BadEntry(str(error)) from error
    profile, files = manifest["profile"], manifest["files"]
    own = _id_of(identity.digest, profile["digest"])
    _need(manifest["id"] == entry_id == own, "the id does not belong to this identity and profile")
    _need(manifest["provenance"].get("computed") is True, "the provenance is not that of a computed run")
    _need(set(files) == set(PARTS), f"unexpected files {sorted(files)}")
    sigmas, shape = manifest["prediction_sigmas"], list(identity.latent_shape)
    predictions = files[PREDICTIONS]["tensors"]
    _need(set(predictions) == {*packing.NAMES, "sigmas"}, f"{PREDICTIONS} holds {sorted(predictions)}")
    _need(predictions["first"][0] in ("float16", "bfloat16"), "predictions are not in 16 bits")
    _need(predictions["first"][1] == shape, "predictions have another shape than the identity")
    _need(predictions["widths"] == ["uint8", [len(sigmas) - 1]], "there are not as many predictions as noise levels")
    _need(predictions["changes"][0] == "uint8" and len(predictions["changes"][1]) == 1, "the changes are malformed")
    _need(predictions["step"] == ["float64", [1]], "the step of the predictions is malformed")
    _need(predictions["sigmas"] == ["float64", [len(sigmas)]], "noise levels have another shape")
    _check_sigmas(sigmas, len(sigmas), BadEntry)
    _need(set(files[RESULT]["tensors"]) == {"result"}, f"{RESULT} holds other tensors")
    _need(files[RESULT]["tensors"]["result"][1] == shape, "the result has another shape than the identity")
    kind, size = files[SIGNATURE]["tensors"][TEXT]
    _need(kind == "float16" and len(size) == 1 and 0 < size[0] <= DIMENSIONS, "the text vector is malformed")


def load_file(folder: Path, manifest: Mapping[str, Any], name: str) -> dict[str, torch.Tensor]:
    """All tensors of one file, checked against size, checksum, names, dtypes, shapes and for finite values.

    The very bytes that were checked are parsed; no handle or mapping stays open. Raises BadEntry, FileNotFoundError.
    """
    record = manifest["files"][name]
    data = _read(folder, name, record["bytes"])
    _need(len(data) == record["bytes"], f"{name} has not the {record['bytes']} bytes it was written with")
    _need(checksum(data) == record["checksum"], f"{name} was altered: its checksum does not match")
    try:
        tensors = load_tensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise BadEntry(f"{name} is no safetensors file: {error}") from error
    _need(_spec(tensors) == record["tensors"], f"{name} holds other tensors than {MANIFEST} says")
    for key, tensor in tensors.items():
        _need(_finite(tensor), f"{key} in {name} holds non-finite values")
    return tensors


def load_predictions(folder: Path, manifest: Mapping[str, Any]) -> torch.Tensor:
    """All predictions (S, *latent)."""
    tensors = load_file(folder, manifest, PREDICTIONS)
    _need(tensors["sigmas"].tolist() == manifest["prediction_sigmas"], "noise levels differ from those of entry.json")
    try:
        predictions = packing.unpack(tensors)
    except ValueError as error:
        raise BadEntry(f"{PREDICTIONS} cannot be unpacked: {error}") from error
    _need(_finite(predictions), f"{PREDICTIONS} leaves the range of its numbers")
    return predictions


def load_all(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Read and check every tensor. Raises like load_file."""
    load_predictions(folder, manifest)
    for name in sorted(set(manifest["files"]) - {PREDICTIONS}):
        load_file(folder, manifest, name)


def load_vector(folder: Path, manifest: Mapping[str, Any]) -> np.ndarray:
    """The text vector alone, float16."""
    try:
        with safe_open(folder / SIGNATURE, framework="np") as file:
            vector = np.array(file.get_tensor(TEXT))
    except FileNotFoundError as error:
        raise _missing(folder, error) from error
    except SafetensorError as error:
        raise BadEntry(f"{SIGNATURE} is no safetensors file: {error}") from error
    size = manifest["files"][SIGNATURE]["tensors"][TEXT][1]
    _need(vector.dtype == np.float16 and list(vector.shape) == size, "the text vector is malformed")
    _need(bool(np.isfinite(vector).all()), "the text vector holds non-finite values")
    return vector


# --- the card: what the index keeps of a manifest ---

_CARD = ("id", "identity", "profile", "provenance", "created", "carnator", "dense_seconds", "prediction_sigmas")


def card_of(manifest: Mapping[str, Any]) -> str:
    return json.dumps({key: manifest[key] for key in _CARD}, separators=(",", ":"))


def bytes_of(manifest: Mapping[str, Any], folder: Path | None = None) -> int:
    """Bytes of the entry's tensors, and of entry.json itself when its folder is given."""
    own = (folder / MANIFEST).stat().st_size if folder else 0
    return own + sum(record["bytes"] for record in manifest["files"].values())


def info_of(card: Mapping[str, Any], size: int, **usage: Any) -> EntryInfo:
    """An EntryInfo from a card (or a whole manifest). Raises KeyError, TypeError, ValueError when malformed."""
    profile = card["profile"]
    return EntryInfo(
        id=card["id"],
        identity=Identity.from_json(card["identity"]),
        profile_digest=profile["digest"],
        prompt=profile["prompt"],
        seed=profile["seed"],
        noise=profile["noise"],
        sigmas=tuple(profile["sigmas"]),
        sampler=profile["sampler"],
        prediction_sigmas=tuple(card["prediction_sigmas"]),
        provenance=dict(card["provenance"]),
        created=card["created"],
        carnator=card["carnator"],
        dense_seconds=card["dense_seconds"],
        bytes=size,
        **{"last_used": card["created"], **usage},
    )
