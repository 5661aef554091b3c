"""What the nodes set on a model: a template, copied with the model; a run takes its own from it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch

from ...carnator_core.gate.policy import DEFAULT
from ...carnator_core.report import RunReport
from ...carnator_core.request import digest_of_tensor
from ...carnator_core.reuse.seeds import OWN
from ...carnator_core.signature.evidence import Evidence

T = TypeVar("T")

KEY = "carnator"  # of our wrappers and attachment
REPORTS_KEPT, ORIGINS_KEPT = 16, 64


@dataclass(frozen=True)
class CacheChoice:
    """The CARNATOR_CACHE type: which bank, how large, and how it may be used."""

    name: str = "default"
    budget_gb: float = 20.0
    mode: str = "on"  # on, read-only, off


@dataclass(frozen=True)
class SparseChoice:
    """`kept`: attention mass in (0, 1]; `kernel`: one of the core's."""

    kept: float
    kernel: str


def digest_of_latent(latent: torch.Tensor) -> str:
    """What latents are known by, whatever precision a node between handed them on in."""
    return digest_of_tensor(latent.detach().float())


class Mailbox(Generic[T]):
    """What is known of the latents that the last runs made, by `digest_of_latent`."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self._known: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, latent: str, known: T) -> None:
        with self._lock:
            self._known[latent] = known
            self._known.move_to_end(latent)
            while len(self._known) > self.kept:
                self._known.popitem(last=False)

    def get(self, latent: str) -> T | None:
        with self._lock:
            return self._known.get(latent)


@dataclass(frozen=True)
class Told:
    """What a report node shows."""

    report: RunReport
    evidence: Evidence | None


REPORTS: Mailbox[Told] = Mailbox(REPORTS_KEPT)
ORIGINS: Mailbox[str] = Mailbox(ORIGINS_KEPT)  # `Profile.noise`, for runs that go on from such a latent


@dataclass(frozen=True)
class Setup:
    """Settings on a model. `nodes`: ids of our nodes on its way, which show what happened."""

    cache: CacheChoice | None = None
    policy: str = DEFAULT
    probe: float | None = None  # share of the schedule; None: the core's own
    donor: str | None = None
    seeds: str = OWN  # whose noise a run starts from
    gated: bool = False  # whether a gate decides; without one nothing is reused
    sparse: SparseChoice | None = None
    nodes: tuple[str, ...] = field(default=())

    def changed(self, node: str | None, **changes: Any) -> Setup:
        nodes = (*self.nodes, node) if node and node not in self.nodes else self.nodes
        return replace(self, nodes=nodes, **changes)

    @property
    def missing(self) -> str | None:
        """What a chain of single nodes still lacks, in a sentence; None when it is whole."""
        if self.cache is None and not self.gated:
            return "only sparse attention is set" if self.sparse else "no Carnator node sets anything"
        if self.cache is None:
            return "no reuse cache is set: add Carnator Early Probe with a Carnator Reuse Cache before the sampler"
        if not self.gated:
            return "no gate is set: add Carnator Compatibility Gate before the sampler"
        return None


def setup_of(model: Any) -> Setup:
    return model.attachments.get(KEY) or Setup()


def with_setup(model: Any, setup: Setup) -> Any:
    """A clone of the model that carries the setup and our one wrapper; the given model stays as it is."""
    from comfy.patcher_extension import WrappersMP

    from .sampling import outer_sample

    clone = model.clone()
    clone.set_attachments(KEY, setup)
    clone.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, KEY)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, outer_sample)
    return clone
