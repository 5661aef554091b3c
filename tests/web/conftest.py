"""ComfyUI's own browser interface in headless Chromium."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

WORKFLOWS = Path(__file__).parents[2] / "workflows"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
PATIENCE = 300_000  # ms; a loaded machine is slow, and a hang is still found
ARRIVED = "window.app?.graph && window.app.canvas && window.app.extensionManager"
ENDS = ["execution_success", "execution_error", "execution_interrupted"]


def chromium() -> str | None:
    """The path of an installed Chromium or Chrome."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Gui:
    """One page with ComfyUI in it, driven as a user does and read as a user sees it."""

    def __init__(self, page, server):
        self.page, self.server = page, server
        self.errors: list[str] = []  # of the page's scripts
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(f"http://{server.address}/")
        page.wait_for_function(ARRIVED)
        page.wait_for_function("!document.querySelector('.p-blockui-mask, #splash-loader')")

    def evaluate(self, script: str, argument=None):
        """The value of a JavaScript function of one argument, in the page."""
        return self.page.evaluate(script, argument)

    def load(self, workflow: dict) -> None:
        """Open a workflow as a file dropped on the page is opened."""
        self.evaluate("(graph) => window.app.loadGraphData(graph)", workflow)
        count = len(workflow["nodes"])
        self.page.wait_for_function("(count) => window.app.graph.nodes.length === count", arg=count)

    def shipped(self, name: str, **values) -> dict:
        """A shipped workflow with a cache name or other widget values changed by node id: `n6={2: 12}`."""
        workflow = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
        for key, changes in values.items():
            (node,) = (n for n in workflow["nodes"] if n["id"] == int(key[1:]))
            for place, value in changes.items():
                node["widgets_values"][place] = value
        return workflow

    def set_widget(self, node: int, name: str, value) -> None:
        script = """([id, name, value]) => {
            const node = window.app.graph.getNodeById(id);
            node.widgets.find((widget) => widget.name === name).value = value;
        }"""
        self.evaluate(script, [node, name, value])

    def queue(self) -> str:
        """Press the run button and wait; the event that ended the run."""
        script = """(ends) => {
            document.body.dataset.ended = "";
            const wait = (name) => window.app.api.addEventListener(
                name, () => (document.body.dataset.ended ||= name), { once: true });
            ends.forEach(wait);
        }"""
        self.evaluate(script, ENDS)
        self.page.locator("[data-testid=queue-button]").first.click()
        self.page.wait_for_function("document.body.dataset.ended")
        return self.page.locator("body").get_attribute("data-ended")

    def view(self, node: int | str):
        """What the widget of a node (by execution id) shows, or None where it has none."""
        script = """(id) => {
            let graph = window.app.graph, node = null;
            for (const part of String(id).split(":")) {
                node = graph?.getNodeById(part);
                graph = node?.subgraph;
            }
            const shown = node?.widgets?.find((widget) => widget.name === "carnator_view")?.element;
            if (!shown) return null;
            const text = (name) => shown.querySelector(".carnator-" + name).textContent;
            return {
                phase: shown.dataset.phase, decision: text("decision"), saved: text("saved"),
                risk: text("risk-words"), reason: text("reason"), images: shown.querySelectorAll("img").length,
                cells: [...shown.querySelectorAll(".carnator-strip span")].map((cell) => cell.dataset.kind),
                label: shown.querySelector(".carnator-strip").getAttribute("aria-label"),
            };
        }"""
        return self.evaluate(script, node)

    def event(self, name: str, detail: dict) -> None:
        """What the page does when this event comes from the server."""
        script = "([name, detail]) => window.app.api.dispatchEvent(new CustomEvent(name, { detail }))"
        self.evaluate(script, [name, detail])

    def setting(self, name: str, value) -> None:
        self.evaluate("([name, value]) => window.app.extensionManager.setting.set(name, value)", [name, value])

    def fit(self) -> None:
        """Bring the whole workflow into sight and let it be drawn."""
        script = """() => new Promise((done) => {
            const canvas = window.app.canvas, margin = 40;
            const boxes = window.app.graph.nodes.map((node) => node.boundingRect ?? node.getBounding());
            const left = Math.min(...boxes.map((box) => box[0])), top = Math.min(...boxes.map((box) => box[1]));
            const right = Math.max(...boxes.map((box) => box[0] + box[2]));
            const bottom = Math.max(...boxes.map((box) => box[1] + box[3]));
            const { width, height } = canvas.canvas.getBoundingClientRect();
            const room = { x: 70, y: 90, width: width - 110, height: height - 150 };
            const scale = Math.min(room.width / (right - left), room.height / (bottom - top), 1.2);
            canvas.ds.scale = scale;
            canvas.ds.offset = [room.x / scale - left, room.y / scale - top];
            canvas.setDirty(true, true);
            requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 300)));
        })"""
        self.evaluate(script)


@contextmanager
def opened(server, width: int = 1600, height: int = 950) -> Iterator[Gui]:
    """A page of the server's interface, without the first visit's tour. Needs `chromium()` and Playwright."""
    from playwright.sync_api import sync_playwright

    server.post("/api/settings/Comfy.TutorialCompleted", True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS, timeout=PATIENCE)
        try:
            yield Gui(browser.new_page(viewport={"width": width, "height": height}), server)
        finally:
            browser.close()


@pytest.fixture(scope="module")
def gui(server) -> Iterator[Gui]:
    """The page that a module's tests share; skipped, with the reason, where no browser can be had."""
    pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install playwright")
    if chromium() is None:
        pytest.skip("no browser: install chromium")
    with opened(server) as page:
        yield page
