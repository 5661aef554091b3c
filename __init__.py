"""Carnator, a ComfyUI node pack: a new text-to-video run borrows the computation of an earlier, similar one."""

import logging
import sys

WEB_DIRECTORY = "./web"

if "folder_paths" in sys.modules:  # inside ComfyUI; test runners import this file without it
    from .nodes.host.compat import too_old

    if reason := too_old():
        logging.getLogger("carnator").error(reason)
        NODE_CLASS_MAPPINGS = {}  # hides the entry point below: no nodes, no traceback


async def comfy_entrypoint():
    """The pack's extension; ComfyUI calls this once while it starts."""
    from .nodes.extension import CarnatorExtension

    return CarnatorExtension()
