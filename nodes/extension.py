"""The list of nodes."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .carnator import Carnator
from .compatibility_gate import CarnatorCompatibilityGate
from .early_probe import CarnatorEarlyProbe
from .embedded_decode import CarnatorEmbeddedDecode
from .embedded_text import CarnatorEmbeddedText
from .host import paths
from .report import CarnatorReport
from .reuse_cache import CarnatorReuseCache
from .sparse_attention import CarnatorSparseAttentionPatch


class CarnatorExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """All nodes of the pack. Registers the pack's folders here: older versions do not call `on_load`."""
        paths.register()
        return [
            Carnator,
            CarnatorReuseCache,
            CarnatorEarlyProbe,
            CarnatorCompatibilityGate,
            CarnatorSparseAttentionPatch,
            CarnatorReport,
            CarnatorEmbeddedText,
            CarnatorEmbeddedDecode,
        ]
