"""What a user sees on the nodes, in ComfyUI's own browser interface."""

from __future__ import annotations

import json
import uuid

import pytest

CARNATOR, REPORT, PROMPT_NODE, SAMPLER = 10, 11, 3, 6
STEPS = 8
TEXT = "one large red ball moving left over the sea, steady camera"
SHOWING = {"Carnator", "CarnatorCompatibilityGate", "CarnatorReport"}
TOLD = {
    "decision": "joint",
    "reason": "1 text token changed, seen in 12% of the clip",
    "risk": 0.2,
    "threshold": 0.5,
    "steps": [{"index": i, "kind": "skipped" if i in (2, 3) else "dense"} for i in range(6)],
    "seconds": {"model": 2.0, "carnator": 0.1},
    "dense_seconds": 3.3,
    "speedup": 1.57,
    "warnings": [],
}


@pytest.fixture
def page(gui):
    """The embedded workflow with few steps, freshly opened; no script of the page may fail meanwhile."""
    gui.load(gui.shipped("embedded", n6={2: STEPS}) | {"id": str(uuid.uuid4())})  # a workflow of its own
    gui.errors.clear()
    yield gui
    assert gui.errors == []


@pytest.fixture
def told(page):
    """The same, with a report shown on the Carnator node."""
    page.event("carnator.report", {"node": str(CARNATOR), "report": TOLD, "summary": "x"})
    return page


def test_a_cold_run_is_a_miss_then_a_changed_word_then_the_first_prompt_is_exact(page, tmp_path):
    assert page.view(CARNATOR)["phase"] == "idle"
    assert page.queue() == "execution_success"
    page.page.wait_for_function("document.querySelectorAll('.carnator-view[data-phase=done]').length === 2")
    cold = page.view(CARNATOR)
    assert cold["decision"] == "Miss" and cold["cells"] == ["dense"] * STEPS and cold["reason"]
    page.set_widget(PROMPT_NODE, "text", TEXT.replace("steady", "panning"))
    assert page.queue() == "execution_success"
    changed = page.view(CARNATOR)
    assert changed["decision"] in ("Joint hit", "Miss") and changed["risk"].startswith("risk 0.")
    assert ("skipped" in changed["cells"]) == (changed["decision"] == "Joint hit")
    page.set_widget(PROMPT_NODE, "text", TEXT)
    assert page.queue() == "execution_success"
    page.page.wait_for_function("document.querySelectorAll('.carnator-view[data-decision=exact]').length === 2")
    exact = page.view(CARNATOR)
    assert exact["cells"] == ["exact"] * STEPS and exact["saved"].endswith("saved")
    assert exact["label"] == f"{STEPS} steps: 0 computed, {STEPS} reused"
    assert page.view(REPORT) == exact
    page.fit()
    page.page.screenshot(path=tmp_path / "exact.png")


def test_the_strip_fills_while_the_run_goes_on(page):
    watch = """() => {
        const shown = window.app.graph.getNodeById(10).widgets.find((w) => w.name === "carnator_view").element;
        window.carnatorTestSeen = [];
        new MutationObserver(() => window.carnatorTestSeen.push([
            shown.dataset.phase, shown.querySelectorAll(".carnator-strip [data-kind=dense]").length,
            shown.querySelectorAll(".carnator-strip span").length,
        ])).observe(shown, { subtree: true, childList: true, attributes: true });
    }"""
    page.set_widget(PROMPT_NODE, "text", TEXT.replace("red", "blue").replace("sea", "desert"))
    page.set_widget(SAMPLER, "seed", 1234)
    page.evaluate(watch)
    assert page.queue() == "execution_success"
    seen = page.evaluate("() => window.carnatorTestSeen")
    during = [filled for phase, filled, cells in seen if phase == "running" and cells == STEPS]
    assert during == sorted(during) and len(set(during)) >= STEPS // 2
    assert page.view(CARNATOR)["phase"] == "done"


def test_the_view_is_told_in_words(told):
    view = told.view(CARNATOR)
    assert view["decision"] == "Joint hit" and view["risk"] == "risk 0.20 of 0.50"
    assert view["saved"] == "1.2 s saved, 1.6x"
    assert view["reason"] == "1 text token changed, seen in 12% of the clip."
    assert view["label"] == "6 steps: 4 computed, 2 reused"
    assert told.view(REPORT)["phase"] == "idle"


def test_nothing_of_the_view_is_saved_or_sent_and_reloading_changes_no_value(told):
    before = told.evaluate("() => window.app.graph.serialize()")
    for _ in range(5):
        told.load(told.evaluate("() => window.app.graph.serialize()"))
    after = told.evaluate("() => window.app.graph.serialize()")
    values = {node["id"]: node.get("widgets_values") for node in before["nodes"]}
    assert {node["id"]: node.get("widgets_values") for node in after["nodes"]} == values
    assert values[CARNATOR] == ["balanced"] and not values[REPORT]
    prompt = told.evaluate("async () => (await window.app.graphToPrompt()).output")
    assert set(prompt[str(CARNATOR)]["inputs"]) == {"model", "policy"}
    assert "carnator_view" not in json.dumps([after, prompt])


def test_the_view_survives_a_reload_of_the_graph_as_undo_makes_one(told):
    view = told.view(CARNATOR)
    told.load(told.evaluate("() => window.app.graph.serialize()"))
    assert told.view(CARNATOR) == view
    told.load(told.shipped("wan21"))
    assert told.view(CARNATOR)["phase"] == "idle"  # another workflow's node of the same id


def test_text_from_the_server_is_shown_as_text(page):
    evil = "<img src=x onerror=\"document.body.dataset.broken='yes'\"><b>x</b>"
    report = {**TOLD, "reason": evil, "decision": evil, "warnings": [evil], "steps": [{"index": 0, "kind": evil}]}
    page.event("carnator.report", {"node": str(CARNATOR), "report": report, "summary": evil})
    view = page.view(CARNATOR)
    assert evil in view["reason"] and view["images"] == 0 and view["decision"] == "Unknown"
    assert page.page.locator("body").get_attribute("data-broken") is None


def test_events_for_nodes_that_are_not_here_are_ignored(told):
    view = told.view(CARNATOR)
    for node in ("999", "12:5", "3:12:5", str(SAMPLER), f"{SAMPLER}:1", "", "x"):
        told.event("carnator.step", {"node": node, "index": 0, "kind": "dense", "steps": 4, "decision": "miss"})
        told.event("carnator.report", {"node": node, "report": TOLD, "summary": ""})
    assert told.view(CARNATOR) == view and told.view(SAMPLER) is None


def test_a_removed_node_and_a_collapsed_one(told):
    told.evaluate("() => window.app.graph.getNodeById(10).collapse()")
    report = {**TOLD, "decision": "miss"}
    told.event("carnator.report", {"node": str(CARNATOR), "report": report, "summary": ""})
    told.evaluate("() => window.app.graph.getNodeById(10).collapse()")
    assert told.view(CARNATOR)["decision"] == "Miss"
    told.evaluate("() => window.app.graph.remove(window.app.graph.getNodeById(10))")
    told.event("carnator.report", {"node": str(CARNATOR), "report": TOLD, "summary": ""})
    assert told.page.locator(".carnator-view").count() == 1  # the report node's


def test_a_node_inside_a_subgraph_shows_its_run(page):
    make = """() => {
        const graph = window.app.graph;
        const { node } = graph.convertToSubgraph(new Set([graph.getNodeById(10)]));
        return node.id;
    }"""
    outer = page.evaluate(make)
    inner = f"{outer}:{CARNATOR}"
    assert page.view(inner)["phase"] == "idle"
    page.set_widget(PROMPT_NODE, "text", TEXT.replace("red", "white"))
    assert page.queue() == "execution_success"
    view = page.view(inner)
    assert view["phase"] == "done" and len(view["cells"]) == STEPS and view["decision"] in ("Miss", "Joint hit")


def test_the_view_is_the_last_widget_of_our_nodes_and_on_no_other(page):
    add = """(names) => names.map((name) => {
        const node = window.LiteGraph.createNode(name);
        window.app.graph.add(node);
        return [name, (node.widgets ?? []).map((widget) => widget.name)];
    })"""
    ours = ["CarnatorReuseCache", "CarnatorEarlyProbe", "CarnatorCompatibilityGate", "CarnatorReport", "Carnator"]
    for name, widgets in page.evaluate(add, [*ours, "KSampler", "ModelSamplingSD3", "PreviewImage"]):
        assert widgets.count("carnator_view") == (name in SHOWING), name
        assert name not in SHOWING or widgets[-1] == "carnator_view"


def test_everything_on_the_view_is_inside_it_in_both_themes(told):
    inside = """() => {
        const shown = window.app.graph.getNodeById(10).widgets.at(-1).element;
        const outer = shown.getBoundingClientRect();
        const parts = [...shown.querySelectorAll("*")].map((part) => part.getBoundingClientRect());
        return parts.every((part) => part.top >= outer.top - 4 && part.bottom <= outer.bottom && part.left >= outer.left
            && part.right <= outer.right) && outer.height > 50;
    }"""
    for theme in ("light", "dark"):
        told.setting("Comfy.ColorPalette", theme)
        told.fit()
        assert told.evaluate(inside), theme


def test_the_view_is_seen_in_every_way_that_nodes_are_drawn(told):
    """The canvas, and the Vue nodes of ComfyUI 0.3.76 and newer."""
    version = told.server.get("/system_stats")["system"]["comfyui_version"]
    ways = [False, True] if tuple(int(part) for part in version.split(".")[:3]) >= (0, 3, 76) else [False]
    for vue in ways:
        told.setting("Comfy.VueNodes.Enabled", vue)
        try:
            told.load(told.evaluate("() => window.app.graph.serialize()"))
            told.fit()
            shown = told.page.locator(".carnator-view[data-decision=joint]")
            shown.first.wait_for(state="visible")
            assert shown.first.bounding_box()["height"] > 40
        finally:
            told.setting("Comfy.VueNodes.Enabled", False)
