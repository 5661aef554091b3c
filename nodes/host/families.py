"""What differs between the model families that the pack handles: the one file of the glue that names them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...carnator_core.grid import TokenGrid
from .taps import ApartWatcher, JointWatcher, Watcher
from .window import Key, Part, part_of_hunyuan, part_of_ltx, part_of_wan


@dataclass(frozen=True)
class Family:
    """`inner` below is the host's `diffusion_model`.

    `kinds`: classes of comfy.model_base, by exact name. `settings`: numbers in a conditioning that must be equal, with
    what the host takes where they lack. `prompt`: tensors in a conditioning that speak of the prompt beside its rows.
    `blocks`: the names of all blocks for the host's hook, in the order of the layers. `part`: what of a block's
    arguments belongs to single tokens. `watcher`: knows how the family lays out its tokens in attention.
    """

    name: str
    kinds: tuple[str, ...]
    patch: Callable[[Any], tuple[int, ...]]  # of inner
    blocks: Callable[[Any], list[Key]]  # of inner
    latent_alone: Callable[[Any], bool]  # whether inner takes nothing but the noisy latent
    part: Part
    settings: tuple[tuple[str, float], ...] = ()
    prompt: tuple[str, ...] = ()
    watcher: type[Watcher] = ApartWatcher

    def grid(self, inner: Any, latent_shape: tuple[int, ...]) -> TokenGrid:
        return TokenGrid.of_latent(latent_shape, tuple(self.patch(inner)))


def _named(kind: str, blocks: Any) -> list[Key]:
    return [(kind, i) for i in range(len(blocks))]


FAMILIES = (
    Family(
        "Wan",
        ("WAN21", "WAN22"),
        patch=lambda inner: inner.patch_size,
        blocks=lambda inner: _named("double_block", inner.blocks),
        # the flag image_to_video says nothing: Wan 2.2 5B, which does both, always has it
        latent_alone=lambda inner: inner.in_dim == inner.out_dim,
        part=part_of_wan,
    ),
    Family(
        "LTX-Video",
        ("LTXV",),
        patch=lambda inner: inner.patchifier.patch_size,
        blocks=lambda inner: _named("double_block", inner.transformer_blocks),
        latent_alone=lambda inner: (
            inner.patchify_proj.in_features == inner.out_channels * math.prod(inner.patchifier.patch_size)
        ),
        part=part_of_ltx,
        settings=(("frame_rate", 25.0),),
        prompt=("attention_mask",),
    ),
    Family(
        "HunyuanVideo",
        ("HunyuanVideo",),
        patch=lambda inner: inner.patch_size,
        blocks=lambda inner: [
            *_named("double_block", inner.double_blocks),
            *_named("single_block", inner.single_blocks),
        ],
        latent_alone=lambda inner: inner.in_channels == inner.out_channels,
        part=part_of_hunyuan,
        settings=(("guidance", 6.0),),
        prompt=("attention_mask", "pooled_output"),
        watcher=JointWatcher,
    ),
)
_BY_KIND = {kind: family for family in FAMILIES for kind in family.kinds}


def family_of(model: Any) -> Family | None:
    """The family of a comfy.model_base model; None for one that is not known."""
    return _BY_KIND.get(type(model).__name__)


def names() -> str:
    """All families, for people."""
    return ", ".join(family.name for family in FAMILIES)
