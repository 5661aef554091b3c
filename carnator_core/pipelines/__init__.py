"""Pipelines: diffusers' (`attach`) and the embedded model's (`generate`), through the same engine."""

from .attached import Attached, attach
from .embedded import Clip, Generator

__all__ = ["Attached", "Clip", "Generator", "attach"]
