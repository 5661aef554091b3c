"""A first-block cache of diffusers on the transformer, beside our reuse.

Where a forward's first block changes little, that cache answers for all other blocks with what they added last time.
It works within a run and reuse between runs, so the computed steps of a hit may go through it. A run in which it
answered is no truth that others may borrow from. What it keeps is of all tokens and of full attention, so region steps
and sparse attention stand down beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from diffusers import FirstBlockCacheConfig
from diffusers.hooks import HookRegistry

from ..attention.connectivity import Connectivity
from ..reuse.engine import Run


def composes(transformer: torch.nn.Module) -> bool:
    """Whether no cache of diffusers is on, or one that reuse composes with."""
    config = getattr(transformer, "_cache_config", None)
    return config is None or (isinstance(config, FirstBlockCacheConfig) and hasattr(transformer, "blocks"))


class FirstBlockWatch:
    """Sees of every forward whether the cache answered for all blocks but the first; nothing where there is none."""

    def __init__(self, transformer: torch.nn.Module):
        self.transformer = transformer
        self.on = bool(getattr(transformer, "is_cache_enabled", False))
        self._costs: list[float] = []
        if self.on:  # what an interrupted run left there is of another clip
            HookRegistry.check_if_exists_or_initialize(transformer).reset_stateful_hooks()

    @property
    def layers(self) -> int:
        """How many blocks may go through a token window: all of the transformer's, none beside the cache."""
        return 0 if self.on else len(self.transformer.blocks)

    def beside(self, sparse: Connectivity | None, run: Run) -> Connectivity | None:
        """The sparse attention that the run may have: the one asked for, none (with a line in the report) beside the
        cache."""
        if sparse is None or not self.on:
            return sparse
        run.report.warnings.append("sparse attention stands down beside diffusers' first-block cache")
        return None

    @contextmanager
    def around(self, context: str | None = None) -> Iterator[None]:
        """Around one forward. `context`: the cache's own name for the branch, where the caller does not set it."""
        if not self.on:
            yield
            return
        last = self.transformer.blocks[-1].register_forward_hook(self._look, with_kwargs=True)
        try:
            with self.transformer.cache_context(context) if context else nullcontext():
                yield
        finally:
            last.remove()

    def _look(self, block: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        came = args[0] if args else kwargs["hidden_states"]
        went = output[0] if isinstance(output, tuple) else output
        self._costs.append(1 / len(self.transformer.blocks) if went is came else 1.0)

    def tell(self, run: Run) -> None:
        """Enter the step that was just observed into the run's report, if the cache had a part in it."""
        costs, self._costs = self._costs, []
        share = sum(costs) / len(costs) if costs else 1.0
        if share < 1:
            run.was_cached(share)
