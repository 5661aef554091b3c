"""The reuse nodes through a started server: the API, the websocket, interrupts, freeing, disks that take no writes."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

aiohttp = pytest.importorskip("aiohttp", reason="aiohttp is missing, which every ComfyUI has: no ComfyUI runs here")
API = json.loads((Path(__file__).parents[2] / "workflows" / "api" / "embedded.json").read_text(encoding="utf-8"))
PROMPT = API["3"]["inputs"]["text"]
CHANGES = (("steady", "panning"), ("sea", "dusk"), ("left", "right"), ("large", "small"), ("ball", "ring"))
STEPS = 8
PATIENCE = 1200.0  # seconds
PICTURES = ("7", "8", "9", "12", "13")  # nodes that no test here looks at


def prompt(text: str = PROMPT, cache: str | None = "server", steps: int = STEPS, carnator: str | None = "10") -> dict:
    """The embedded workflow with policy fast and its latent saved. `carnator`: its node's id; None: without it."""
    api = {key: node for key, node in copy.deepcopy(API).items() if key not in PICTURES}
    api["3"]["inputs"]["text"] = text
    api["6"]["inputs"]["steps"] = steps
    api["21"] = {"class_type": "SaveLatent", "inputs": {"samples": ["6", 0], "filename_prefix": "latents/test"}}
    mine, report = api.pop("10"), api.pop("11")
    if carnator is None:
        api["6"]["inputs"]["model"] = ["2", 0]
        return api
    if cache:
        api["20"] = {"class_type": "CarnatorReuseCache", "inputs": {"name": cache, "budget_gb": 1.0, "mode": "on"}}
        mine["inputs"]["cache"] = ["20", 0]
    mine["inputs"]["policy"] = "fast"
    api[carnator] = mine
    api["6"]["inputs"]["model"] = report["inputs"]["model"] = [carnator, 0]
    del report["inputs"]["images"]
    api["11"] = report
    return api


def report_of(entry: dict) -> dict:
    return entry["outputs"]["11"]["carnator"][0]["report"]


def latent_of(server, entry: dict) -> torch.Tensor:
    (saved,) = entry["outputs"]["21"]["latents"]
    return load_file(server.base / "output" / saved["subfolder"] / saved["filename"])["latent_tensor"]


def from_hosts_cache(entry: dict) -> set[str]:
    """Nodes that the host did not run again."""
    return {node for name, data in entry["status"]["messages"] if name == "execution_cached" for node in data["nodes"]}


class Listener:
    """A browser's websocket: every JSON message as (type, data), in order."""

    def __init__(self, server):
        self.client = uuid.uuid4().hex
        self.messages: list[tuple[str, dict]] = []
        self._news, self._open = threading.Condition(), threading.Event()
        self._loop = asyncio.new_event_loop()
        url = f"http://{server.address}/ws?clientId={self.client}"
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._listen(url),), daemon=True)
        self._thread.start()
        assert self._open.wait(PATIENCE)

    async def _listen(self, url: str) -> None:
        self._stop = asyncio.Event()
        async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as socket:
            self._open.set()
            ending = asyncio.ensure_future(self._stop.wait())
            while not ending.done():
                message = asyncio.ensure_future(socket.receive())
                await asyncio.wait({message, ending}, return_when=asyncio.FIRST_COMPLETED)
                if message.done() and message.result().type == aiohttp.WSMsgType.TEXT:
                    said = json.loads(message.result().data)
                    with self._news:
                        self.messages.append((said["type"], said["data"]))
                        self._news.notify_all()
                elif message.done():
                    return
                else:
                    message.cancel()

    def of(self, kind: str) -> list[dict]:
        """The data of all messages of one type so far."""
        with self._news:
            return [data for name, data in self.messages if name == kind]

    def wait_for(self, kind: str, fits: Callable[[dict], bool] = lambda data: True) -> dict:
        """The first message of a type that fits."""
        end = time.monotonic() + PATIENCE
        with self._news:
            while time.monotonic() < end:
                for name, data in self.messages:
                    if name == kind and fits(data):
                        return data
                self._news.wait(1)
        raise AssertionError(f"no {kind} came; types so far: {sorted({name for name, _ in self.messages})}")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)


@pytest.fixture
def listener(server) -> Iterator[Listener]:
    one = Listener(server)
    yield one
    one.close()


@pytest.fixture(scope="module")
def stock(server) -> Callable[[str], torch.Tensor]:
    """The latent of a prompt in the stock workflow, each computed once."""
    known: dict[str, torch.Tensor] = {}

    def of(text: str) -> torch.Tensor:
        if text not in known:
            known[text] = latent_of(server, server.run(prompt(text, carnator=None)))
        return known[text]

    return of


@pytest.fixture(scope="module")
def cold(server, stock) -> dict:
    """The history entry of the first run into the bank `server`; the stock run went before it."""
    stock(PROMPT)
    return server.run(prompt())


def test_a_cold_run_is_a_miss_that_equals_the_stock_run_and_is_kept(server, stock, cold):
    told = report_of(cold)
    assert told["decision"] == "miss" and told["written"] and told["forwards"] == STEPS, told
    assert torch.equal(latent_of(server, cold), stock(PROMPT))
    assert (server.base / "models" / "carnator" / "server").is_dir()
    assert "Carnator: miss" in cold["outputs"]["11"]["carnator"][0]["summary"]


def test_removing_the_node_between_runs_gives_the_stock_run_again(server, stock, cold):
    first = stock(PROMPT)
    server.run(prompt(PROMPT.replace("red", "blue")))
    again = server.run(prompt(carnator=None))
    assert not {"6", "21"} & from_hosts_cache(again) and torch.equal(latent_of(server, again), first)


def test_an_identical_prompt_is_served_by_the_host_and_still_has_its_report(server, listener, cold):
    api = prompt(steps=STEPS + 1)
    first = server.run(api, client_id=listener.client)
    second = server.run(api, client_id=listener.client)
    assert {"6", "10", "11"} <= from_hosts_cache(second)
    assert report_of(second) == report_of(first)


def test_after_free_the_same_request_is_exact_from_disk(server, cold):
    for _ in range(20):  # the server frees when its queue is idle, at a moment of its own
        server.post("/free", {"unload_models": True, "free_memory": True})
        time.sleep(0.5)
        entry = server.run(prompt())
        if not {"1", "6"} & from_hosts_cache(entry):
            break
    else:
        raise AssertionError("the server did not free its cache")
    told = report_of(entry)
    assert told["decision"] == "exact", told["reason"]
    assert told["donor"] == report_of(cold)["written"] and told["forwards"] == 0
    assert [row["kind"] for row in told["steps"]] == ["exact"] * STEPS
    assert torch.equal(latent_of(server, entry), latent_of(server, cold))


def test_a_one_word_change_borrows_or_equals_the_stock_run(server, stock, cold):
    """Which changes the gate accepts depends on the weights of the day; what either answer means does not."""
    decisions = set()
    for old, new in CHANGES:
        text = PROMPT.replace(old, new)
        entry = server.run(prompt(text))
        told = report_of(entry)
        decisions.add(told["decision"])
        if told["decision"] == "joint":
            assert told["forwards"] < STEPS and told["risk"] <= told["threshold"] and told["written"] is None
            assert told["donor"] and any(row["kind"] == "skipped" for row in told["steps"])
            break
        assert told["decision"] == "miss" and told["risk"] > told["threshold"] and told["forwards"] == STEPS
        assert torch.equal(latent_of(server, entry), stock(text))
    print("decisions:", decisions)


def test_steps_and_the_report_reach_the_browser_under_the_nodes_own_id(server, listener):
    """An id as ComfyUI gives it inside a subgraph, also right after the same node ran under another id."""
    before = prompt(cache="events", carnator="10")
    before["6"]["inputs"]["seed"] = 99
    server.run(before, client_id="another browser")
    entry = server.run(prompt(cache="events", carnator="12:10"), client_id=listener.client)
    listener.wait_for("execution_success")
    steps = listener.of("carnator.step")
    assert [data["index"] for data in steps] == list(range(STEPS))
    assert {(data["node"], data["kind"], data["steps"]) for data in steps} == {("12:10", "dense", STEPS)}
    (sent,) = listener.of("carnator.report")
    assert sent["node"] == "12:10" and sent["report"]["decision"] == "miss" and "miss" in sent["summary"]
    executed = listener.wait_for("executed", lambda data: data["node"] == "11")
    assert executed["output"] == entry["outputs"]["11"]
    kinds = [name for name, _ in listener.messages if name.startswith("carnator.")]
    assert kinds == ["carnator.step"] * STEPS + ["carnator.report"]


def test_events_of_a_run_reach_only_the_browser_that_queued_it(server, listener):
    other = Listener(server)
    try:
        server.run(prompt(PROMPT.replace("red", "cyan"), cache="events"), client_id=listener.client)
        listener.wait_for("carnator.report")
        assert not other.of("carnator.report") and not other.of("carnator.step")
    finally:
        other.close()


def test_an_interrupt_in_the_middle_leaves_nothing_and_the_next_run_is_normal(server, listener, stock):
    cache = "interrupted"
    queued = server.queue(prompt(cache=cache, steps=60), client_id=listener.client)
    listener.wait_for("carnator.step", lambda data: data["index"] >= 3)
    server.post("/interrupt", {})
    entry = server.wait(queued)
    assert "execution_interrupted" in [name for name, _ in entry["status"]["messages"]]
    sent = listener.wait_for("carnator.report")["report"]
    assert "did not end" in " ".join(sent["warnings"]) and 3 < len(sent["steps"]) < 60
    after = server.run(prompt(cache=cache))
    told = report_of(after)
    assert told["decision"] == "miss" and told["written"] and torch.equal(latent_of(server, after), stock(PROMPT))
    assert told["reason"] == "the bank is empty"


def normal_runs_with_a_warning(server, stock, cache: str) -> None:
    """Two runs that equal the stock ones; the report of each says why nothing was kept, the log once."""
    logs = [server.log()]
    for text in (PROMPT, PROMPT.replace("red", "blue")):
        entry = server.run(prompt(text, cache=cache))
        told = report_of(entry)
        assert told["decision"] == "miss" and told["written"] is None and told["forwards"] == STEPS
        assert torch.equal(latent_of(server, entry), stock(text))
        assert any(cache in warning for warning in told["warnings"]), told["warnings"]
        logs.append(server.log())
    assert "Traceback" not in logs[2][len(logs[0]) :]
    warned = [log.count("choose another") for log in logs]  # the bank's advice
    assert warned[0] < warned[1] == warned[2]


def test_a_file_in_the_place_of_the_bank_costs_a_warning_and_nothing_else(server, stock, cold):
    (server.base / "models" / "carnator" / "in the way").write_text("not a folder")
    normal_runs_with_a_warning(server, stock, "in the way")


@pytest.fixture
def full_disk(server) -> Iterator[str]:
    """A bank on a disk of 64 KB; mounting one takes root on Linux."""
    place = server.base / "models" / "carnator" / "full"
    place.mkdir(parents=True)
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("a small disk can be mounted by root on Linux only")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk could be mounted: {mounted.stderr.decode().strip()}")
    yield place.name
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_costs_a_warning_and_nothing_else(server, stock, full_disk):
    normal_runs_with_a_warning(server, stock, full_disk)


def test_the_default_bank_lies_in_the_models_folder(server):
    api = prompt(cache=None)
    api["6"]["inputs"]["seed"] = 4242  # nobody else's, so that nothing here can lend
    told = report_of(server.run(api))
    place = server.base / "models" / "carnator" / "default"
    assert told["written"] and any(told["written"] in str(path) for path in place.rglob("*"))
