"""Make the pictures of the README and of the workflow templates anew, from a running ComfyUI that has the pack.

    python tests/web/pictures.py 127.0.0.1:8188

Writes docs/comfyui.png (a changed word borrows from the run before it) and workflows/*.jpg. Takes Chromium, Playwright
and Pillow.
"""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import urllib.request
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
TEMPLATE = (640, 380)  # pixels
TEXT = "one large red ball moving left over the sea, steady camera"
CHANGED = TEXT.replace("steady", "panning")
QUIET = "!/\\d (running|jobs? completed)/.test(document.body.innerText)"


class Running:
    """A server that someone else started."""

    def __init__(self, address: str):
        self.address = address

    def post(self, path: str, data) -> None:
        body = json.dumps(data).encode()
        request = urllib.request.Request(f"http://{self.address}{path}", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request).read()


def picture(gui) -> Image.Image:
    gui.fit()
    gui.page.wait_for_function(QUIET)
    return Image.open(io.BytesIO(gui.page.screenshot())).convert("RGB")


def main(address: str) -> None:
    spec = importlib.util.spec_from_file_location("web_conftest", Path(__file__).parent / "conftest.py")
    web = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(web)
    with web.opened(Running(address)) as gui:
        for setting in ("Comfy.Minimap.Visible", "Comfy.VueNodes.Enabled"):
            gui.setting(setting, False)
        for path in sorted((ROOT / "workflows").glob("*.json")):
            gui.load(gui.shipped(path.stem))
            if path.stem == "embedded":
                gui.queue()
                gui.set_widget(3, "text", CHANGED)
                gui.queue()
                picture(gui).save(ROOT / "docs" / "comfyui.png", optimize=True)
            picture(gui).resize(TEMPLATE, Image.Resampling.LANCZOS).save(path.with_suffix(".jpg"), quality=85)
            print(f"{path.stem}: {gui.view(10)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
