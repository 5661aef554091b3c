"""The embedded transformer: Wan 2.1's own architecture in a size that trains on two CPU cores.

The weights file keeps the original Wan key names, so ComfyUI's own loader takes it as it is; `load()` renames them for
diffusers. Latents, timesteps and predictions follow Wan: x = (1 - sigma) x0 + sigma noise, timestep = 1000 sigma,
prediction v = noise - x0.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from .keys import from_original, to_original

WEIGHTS = Path(__file__).parent / "weights" / "carnator_mini_t2v.safetensors"

CONFIG = dict(
    patch_size=(1, 2, 2),
    num_attention_heads=2,
    attention_head_dim=128,
    in_channels=16,
    out_channels=16,
    text_dim=4096,
    freq_dim=256,
    ffn_dim=512,
    num_layers=5,
    cross_attn_norm=True,
    qk_norm="rms_norm_across_heads",
)

SHIFT = 3.0  # Wan's flow shift: sigma = shift u / (1 + (shift - 1) u)


def build(**changes: int) -> WanTransformer3DModel:
    """An untrained embedded model in float32; `changes` replace entries of `CONFIG`."""
    return WanTransformer3DModel(**{**CONFIG, **changes})


def size_of(state: dict[str, torch.Tensor]) -> dict[str, int]:
    """The entries of `CONFIG` that a state dict (diffusers' key names) was built with, read from its shapes."""
    return dict(
        num_attention_heads=state["patch_embedding.weight"].shape[0] // CONFIG["attention_head_dim"],
        num_layers=1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks.")),
        ffn_dim=state["blocks.0.ffn.net.0.proj.weight"].shape[0],
    )


def save(model: WanTransformer3DModel, path: Path, metadata: dict[str, str]) -> None:
    """Write bfloat16 weights under the original Wan key names."""
    state = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in to_original(model.state_dict()).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path, metadata=metadata)


def load(path: Path = WEIGHTS, dtype: torch.dtype = torch.float32) -> WanTransformer3DModel:
    """The trained embedded model; FileNotFoundError names the command that trains one."""
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}; train them with: python -m carnator_core.mini.train")
    state = from_original(load_file(path))
    model = build(**size_of(state))
    if model.dtype != dtype:  # diffusers warns of any .to(), also of one that changes nothing
        model = model.to(dtype)
    model.load_state_dict({k: v.to(dtype) for k, v in state.items()})
    return model.eval().requires_grad_(False)
