"""Backbones: what differs between model families, one file each. `find` names the one for a diffusers transformer."""

from __future__ import annotations

import torch

from . import cogvideox, hunyuan, ltx, wan

REAL_WIDTHS = wan.REAL_WIDTHS
ALL = (wan, ltx, hunyuan, cogvideox)
PIPELINES = tuple(name for backbone in ALL for name in backbone.PIPELINES)


def find(transformer: torch.nn.Module):
    """The backbone module of a diffusers transformer, or None when the family is not known."""
    return next((backbone for backbone in ALL if backbone.takes(transformer)), None)
