"""Carnator's host-agnostic core: reuse of video diffusion computation across requests."""

__version__ = "0.1.0"
