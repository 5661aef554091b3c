"""Low-rank changes of the embedded model's weights: start one, apply it, merge it, save and load it.

A LoRA changes a weight W (out, in) by up @ down, with down (rank, in) and up (out, rank) (Hu et al. 2021, section 4.1).
Files hold both factors in bfloat16 under Wan's original key names behind `diffusion_model.`, as `lora_A` (down) and
`lora_B` (up) without alpha, which ComfyUI reads as a scale of 1. In memory they carry diffusers' weight names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from .keys import from_original, to_original

PREFIX = "diffusion_model."
# 4096 wide, so dear; the text embedder's second matrix and every cross attention behind it can change the same things
LEFT_ALONE = ("condition_embedder.text_embedder.linear_1",)


@dataclass
class Lora:
    """Factors by diffusers' weight names: (down (rank, in), up (out, rank)) in float32."""

    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]
    metadata: dict[str, str] = field(default_factory=dict)

    def parameters(self) -> list[torch.Tensor]:
        return [factor for pair in self.pairs.values() for factor in pair]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Both factors by name: `<weight>.down` and `<weight>.up`."""
        return {
            f"{name}.{kind}": factor
            for name, pair in self.pairs.items()
            for kind, factor in zip(("down", "up"), pair, strict=True)
        }

    @torch.no_grad()
    def copy_(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the values of another LoRA's `tensors()`. KeyError when a factor is missing."""
        for name, factor in self.tensors().items():
            factor.copy_(tensors[name])


def start(model: nn.Module, rank: int, seed: int) -> Lora:
    """A trainable LoRA that changes nothing yet: random down, zero up.

    It covers every linear layer but `LEFT_ALONE`; layers outside the blocks (time, text, head) get half the rank.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or name in LEFT_ALONE:
            continue
        out, width = layer.weight.shape
        r = min(rank if name.startswith("blocks.") else max(1, rank // 2), out, width)
        down = (torch.rand(r, width, generator=generator) * 2 - 1) / width**0.5
        device = layer.weight.device
        pairs[f"{name}.weight"] = (
            down.to(device).requires_grad_(),
            torch.zeros(out, r, device=device).requires_grad_(),
        )
    return Lora(pairs)


def changed_weights(model: nn.Module, lora: Lora, strength: float = 1.0) -> dict[str, torch.Tensor]:
    """The weights that a LoRA covers with its change added, differentiable with respect to the factors.

    For `torch.func.functional_call`, which applies them without touching the model. ValueError names a weight that
    the model does not have in that shape.
    """
    weights = dict(model.named_parameters())
    out = {}
    for name, (down, up) in lora.pairs.items():
        weight = weights.get(name)
        if weight is None or tuple(weight.shape) != (up.shape[0], down.shape[1]):
            found = "is missing" if weight is None else f"is {tuple(weight.shape)}"
            raise ValueError(f"this LoRA changes {name} of {(up.shape[0], down.shape[1])}, which {found} in the model")
        out[name] = weight + strength * (up @ down).to(weight)
    return out


@torch.no_grad()
def merge(model: nn.Module, lora: Lora, strength: float = 1.0) -> None:
    """Add the change to the model's own weights. ValueError, and an untouched model, when it does not fit."""
    changed = changed_weights(model, lora, strength)
    for name, weight in model.named_parameters():
        if name in changed:
            weight.copy_(changed[name])


def save(lora: Lora, path: Path) -> None:
    """Write bfloat16 factors in the form that ComfyUI's LoRA loaders take for Wan."""
    state = {}
    for name, (down, up) in to_original(lora.pairs).items():
        stem = PREFIX + name.removesuffix(".weight")
        state[f"{stem}.lora_A.weight"] = down.detach().to(torch.bfloat16).cpu().contiguous()
        state[f"{stem}.lora_B.weight"] = up.detach().to(torch.bfloat16).cpu().contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path, metadata={"format": "pt", **lora.metadata})


def load(path: Path) -> Lora:
    """A LoRA in the form that `save` writes; an alpha is folded into the factors (scale alpha / rank).

    FileNotFoundError when there is none, ValueError on keys of another form, KeyError on layers that Wan lacks.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no LoRA at {path}")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        state = {key: file.get_tensor(key).float() for key in file.keys()}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in state.items():
        match = re.fullmatch(re.escape(PREFIX) + r"(.+)\.(lora_A\.weight|lora_B\.weight|alpha)", key)
        if not match:
            raise ValueError(f"{key!r} is no key of a LoRA in the form {PREFIX}<layer>.lora_A.weight")
        parts.setdefault(match[1], {})[match[2]] = value
    pairs = {}
    for stem, found in parts.items():
        if not {"lora_A.weight", "lora_B.weight"} <= set(found):
            raise ValueError(f"{PREFIX}{stem} needs both lora_A.weight and lora_B.weight")
        down, up = found["lora_A.weight"], found["lora_B.weight"]
        scale = found["alpha"].item() / down.shape[0] if "alpha" in found else 1.0
        pairs[f"{stem}.weight"] = (down, scale * up)
    return Lora(from_original(pairs), metadata)
