"""The shipped workflows: both forms are one graph, the GUI's form is whole, and the client runs the API's."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKFLOWS = Path(__file__).parents[2] / "workflows"
NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.json"))
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")


def shipped(form: str) -> dict:
    return json.loads((WORKFLOWS / form).read_text(encoding="utf-8"))


def has_widget(declared: list) -> bool:
    return isinstance(declared[0], list) or declared[0] in WIDGETS


def as_prompt(workflow: dict, object_info: dict) -> dict:
    """A workflow of the GUI in API form: widget values by position, links by source."""
    source = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        declared, values = object_info[node["type"]], iter(node["widgets_values"])
        linked = {i["name"]: source[i["link"]] for i in node["inputs"] if i["link"]}
        inputs = {}
        for group in ("required", "optional"):
            for name in declared["input_order"].get(group, ()):
                kind = declared["input"][group][name]
                if name in linked:
                    inputs[name] = linked[name]
                elif has_widget(kind):
                    inputs[name] = next(values)
                else:
                    assert group == "optional", f"{node['type']} lacks {name}"
                if (kind[1:] or [{}])[0].get("control_after_generate"):
                    assert next(values) == "fixed", "a shipped seed must stay"
        assert next(values, None) is None, f"{node['type']} has more values than widgets"
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


@pytest.mark.parametrize("name", NAMES)
def test_the_two_forms_are_the_same_graph(server, name):
    api = {key: {k: n[k] for k in ("class_type", "inputs")} for key, n in shipped(f"api/{name}.json").items()}
    gui = shipped(f"{name}.json")
    info = {n["type"]: server.get(f"/object_info/{n['type']}")[n["type"]] for n in gui["nodes"]}
    assert as_prompt(gui, info) == api


@pytest.mark.parametrize("name", NAMES)
def test_links_and_places_are_whole(name):
    gui = shipped(f"{name}.json")
    nodes = {node["id"]: node for node in gui["nodes"]}
    assert gui["last_node_id"] == max(nodes) and gui["last_link_id"] == max(link[0] for link in gui["links"])
    for link, source, out, target, place, kind in gui["links"]:
        assert link in nodes[source]["outputs"][out]["links"] and nodes[source]["outputs"][out]["type"] == kind
        assert nodes[target]["inputs"][place]["link"] == link and nodes[target]["inputs"][place]["type"] == kind
    boxes = [(*n["pos"], n["pos"][0] + n["size"][0], n["pos"][1] + n["size"][1], n["type"]) for n in gui["nodes"]]
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert apart, f"{a[4]} lies over {b[4]}"


@pytest.mark.parametrize("name", NAMES)
def test_every_workflow_reuses_and_reports(name):
    """Carnator lies between the model and the sampler, and the report has the sampler's model and latent."""
    api = shipped(f"api/{name}.json")
    (carnator,) = (key for key, node in api.items() if node["class_type"] == "Carnator")
    (sampler,) = (key for key, node in api.items() if node["class_type"] == "KSampler")
    (report,) = (node["inputs"] for node in api.values() if node["class_type"] == "CarnatorReport")
    assert api[sampler]["inputs"]["model"] == report["model"] == [carnator, 0]
    assert report["samples"] == [sampler, 0]


def test_the_server_lists_the_workflows_as_templates(server):
    assert set(NAMES) <= set(server.get("/workflow_templates")["carnator"])


def client(server, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(WORKFLOWS / "queue_prompts.py"), "--server", f"http://{server.address}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200)


@pytest.fixture
def quick(tmp_path) -> Path:
    """The embedded workflow with few steps and a cache of its own."""
    api = shipped("api/embedded.json")
    api["6"]["inputs"]["steps"] = 6
    api["30"] = {"class_type": "CarnatorReuseCache", "inputs": {"name": "client", "budget_gb": 1.0, "mode": "on"}}
    api["10"]["inputs"]["cache"] = ["30", 0]
    path = tmp_path / "quick.json"
    path.write_text(json.dumps(api), encoding="utf-8")
    return path


def test_the_client_prints_decision_risk_and_time_of_each_prompt(server, quick, tmp_path):
    first, second = (f"one large {colour} ball moving left over the sea" for colour in ("red", "blue"))
    listed = tmp_path / "prompts.txt"
    listed.write_text(f"# comment\n\n{first}\n{first}\n", encoding="utf-8")
    done = client(server, "--workflow", str(quick), "--json", "--file", str(listed), first, second)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    # arguments come first: a cold run, another prompt, the first one again from the bank, then from ComfyUI's own cache
    assert [row["prompt"] for row in told] == [first, second, first, first]
    assert told[0]["decision"] == "miss" and told[1]["decision"] in ("miss", "joint")
    assert [told[2]["decision"], told[3]["decision"]] == ["exact", "unchanged"]
    assert told[2]["donor"] == told[0]["written"] and told[1]["risk"] is not None
    assert all(row["seconds"] > 0 for row in told[:3])
    table = client(server, "--workflow", str(quick), second)
    assert table.returncode == 0
    assert second in table.stdout.splitlines()[1] and "risk" in table.stdout.splitlines()[0]


def test_the_client_finds_the_prompt_in_every_shipped_workflow_and_in_custom_samplers():
    spec = importlib.util.spec_from_file_location("queue_prompts", WORKFLOWS / "queue_prompts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in NAMES:
        assert module.text_node(shipped(f"api/{name}.json")) == "3"
    guided = {
        "a": {"class_type": "CLIPTextEncode", "inputs": {"text": "x", "clip": ["c", 0]}},
        "f": {"class_type": "FluxGuidance", "inputs": {"conditioning": ["a", 0], "guidance": 3.5}},
        "g": {"class_type": "BasicGuider", "inputs": {"model": ["m", 0], "conditioning": ["f", 0]}},
    }
    assert module.text_node(guided) == "a"


def test_the_client_says_what_is_wrong(server, tmp_path, quick):
    assert client(server).returncode == 2
    gui = client(server, "--workflow", str(WORKFLOWS / "embedded.json"), "x")
    assert gui.returncode == 2 and "API form" in gui.stderr
    missing = client(server, "--workflow", str(WORKFLOWS / "api" / "wan21.json"), "x")
    assert missing.returncode == 1 and "wan2.1_t2v_1.3B_fp16.safetensors" in missing.stderr
    nobody = client(server, "--server", "http://127.0.0.1:9", "x")
    assert nobody.returncode == 1 and "no ComfyUI answers" in nobody.stderr
