"""ComfyUI for the tests: where it lies, whether this Python can run it, and a started server with the pack in it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPTIONAL = {"torchaudio", "comfyui-workflow-templates", "comfyui-embedded-docs"}  # ComfyUI starts without these


def find_comfyui() -> Path | str:
    """The ComfyUI to test in, or why there is none: COMFYUI_PATH, the one this pack lies in, comfy-cli's default."""
    given = os.environ.get("COMFYUI_PATH")
    inside = ROOT.parent.parent if ROOT.parent.name == "custom_nodes" else None
    places = [Path(given).expanduser()] if given else [inside, Path.home() / "comfy" / "ComfyUI"]
    for place in filter(None, places):
        if (place / "comfy" / "samplers.py").is_file() and (place / "main.py").is_file():
            return place.resolve()
    if given:
        raise pytest.UsageError(f"COMFYUI_PATH={given} holds no ComfyUI")
    return "no ComfyUI found: set COMFYUI_PATH to a checkout"


def missing_requirements(comfyui: Path) -> list[str]:
    """Packages that this ComfyUI needs and this Python lacks."""
    needed = []
    for line in (comfyui / "requirements.txt").read_text().splitlines():
        if line.startswith("#non essential"):
            break
        if name := re.match(r"[A-Za-z0-9._-]+", line):
            needed.append(name[0].lower())
    needed.append("requests")  # imported at start, in no version's list
    return [name for name in needed if name not in OPTIONAL and not _installed(name)]


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="session")
def comfyui() -> Path:
    """The folder of a ComfyUI that this Python can run; tests that ask for it are skipped where there is none."""
    place = find_comfyui()
    if isinstance(place, str):
        pytest.skip(place)
    if missing := missing_requirements(place):
        pytest.skip(f"{sys.executable} cannot run the ComfyUI at {place}: it lacks {', '.join(missing)}")
    return place


class Server:
    """A ComfyUI of its own on a free port, with the pack as its only custom node and a base folder of its own."""

    def __init__(self, comfyui: Path, base: Path, *options: str):
        self.base = base
        (base / "custom_nodes").mkdir(parents=True)
        (base / "custom_nodes" / "carnator").symlink_to(ROOT, target_is_directory=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self.log_file = base / "server.log"
        command = [sys.executable, "main.py", "--cpu", "--listen", "127.0.0.1", "--port", str(port)]
        command += ["--disable-api-nodes", "--disable-auto-launch", "--database-url", "sqlite:///:memory:"]
        command += ["--base-directory", str(base), "--disable-all-custom-nodes", "--whitelist-custom-nodes", "carnator"]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen([*command, *options], cwd=comfyui, stdout=log, stderr=subprocess.STDOUT)

    def log(self) -> str:
        """What the server has printed so far."""
        return self.log_file.read_text(errors="replace")

    def wait_until_ready(self, seconds: float = 1200) -> None:
        """Return once it answers; RuntimeError with the end of its log if it dies or takes longer."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.get("/system_stats")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        raise RuntimeError(f"ComfyUI did not start:\n{self.log()[-3000:]}")

    def text(self, path: str) -> str:
        """The body of GET `path`."""
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=30) as answer:
            return answer.read().decode()

    def get(self, path: str):
        """The JSON answer of GET `path`."""
        return json.loads(self.text(path))

    def post(self, path: str, data: dict):
        """The JSON answer of POST `path`, None where it is empty; HTTPError's message holds the server's own."""
        body = json.dumps(data).encode()
        request = urllib.request.Request(f"http://{self.address}{path}", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            error.msg += f": {error.read().decode(errors='replace')}"
            raise
        return json.loads(text) if text else None

    def queue(self, prompt: dict, **extra) -> str:
        """Queue a workflow in API form; its prompt id. `extra` goes beside it, such as client_id."""
        return self.post("/prompt", {"prompt": prompt, **extra})["prompt_id"]

    def wait(self, prompt_id: str, seconds: float = 1200) -> dict:
        """The history entry of a queued prompt, once it has ended in whatever way."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if entry := self.get(f"/history/{prompt_id}").get(prompt_id):
                return entry
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"prompt {prompt_id} has not ended:\n{self.log()[-3000:]}")

    def run(self, prompt: dict, **extra) -> dict:
        """Queue, wait, and return the history entry; AssertionError with the server's messages unless it succeeded."""
        entry = self.wait(self.queue(prompt, **extra))
        assert entry["status"]["status_str"] == "success", entry["status"]["messages"]
        return entry

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="session")
def start_server(comfyui, tmp_path_factory):
    """`start_server(*options)` -> a ready Server with those command-line options; stopped at the end of the session."""
    started: list[Server] = []

    def start(*options: str) -> Server:
        started.append(Server(comfyui, tmp_path_factory.mktemp("server"), *options))
        started[-1].wait_until_ready()
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture(scope="session")
def server(start_server) -> Server:
    """One started ComfyUI for all tests that do not need options of their own."""
    return start_server()
