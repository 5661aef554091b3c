"""The pack's own socket types."""

from __future__ import annotations

from comfy_api.latest import io

Cache = io.Custom("CARNATOR_CACHE")
