"""Carnator Reuse Cache: which donors there are, and how much room they may take."""

from __future__ import annotations

from comfy_api.latest import io

from .host import banks, compat
from .host.setup import CacheChoice
from .types import Cache

MODES = {"on": "on", "read only": "read-only", "off": "off"}


class CarnatorReuseCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return compat.schema(
            io,
            node_id="CarnatorReuseCache",
            display_name="Carnator Reuse Cache",
            category="carnator",
            description="Chooses where earlier clips are kept and how much disk they may take. Files: models/carnator.",
            search_aliases=["bank", "donors", "disk"],
            inputs=[
                io.String.Input(
                    "name",
                    default="default",
                    tooltip="A folder below models/carnator. Use one for each project if projects should not share.",
                ),
                io.Float.Input(
                    "budget_gb",
                    default=20.0,
                    min=0.1,
                    max=10000.0,
                    step=0.5,
                    tooltip="Most disk space in GB. When it is full, the clips that save least are removed. 20 holds "
                    "about 400 clips of Wan 2.1 1.3B, 81 frames at 832 x 480.",
                ),
                io.Combo.Input(
                    "mode",
                    options=list(MODES),
                    default="on",
                    tooltip="on: reuse and remember. read only: reuse, write nothing. off: sample as without Carnator.",
                ),
            ],
            outputs=[Cache.Output(tooltip="For Carnator or Carnator Early Probe.")],
        )

    @classmethod
    def execute(cls, name: str, budget_gb: float, mode: str) -> io.NodeOutput:
        """ValueError for a name that is no folder name."""
        banks.folder_of(name)
        return io.NodeOutput(CacheChoice(name, budget_gb, MODES[mode]))
