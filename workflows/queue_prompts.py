"""Queue prompts on a running ComfyUI and print what Carnator did with each. Standard library only.

    python workflows/queue_prompts.py "one large red ball moving left over the sea, steady camera" \
        "one large red cross moving left over the sea, steady camera"
    python workflows/queue_prompts.py --workflow mine.json --file prompts.txt

The workflow is in API form ("Export (API)" in ComfyUI) and holds a Carnator Report node. Seeds stay as they are in it.
Exit code 0, 1 when a prompt failed or the server did not answer, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

EMBEDDED = Path(__file__).parent / "api" / "embedded.json"
POLL_SECONDS = 0.25
POSITIVE = ("positive", "conditioning")  # inputs that lead from a sampler or a guider to the prompt


class Failed(Exception):
    """What to tell the user."""


class Client:
    """The parts of ComfyUI's HTTP API that are needed here."""

    def __init__(self, server: str):
        self.server = server.rstrip("/")
        self.id = uuid.uuid4().hex  # some versions record outputs served from their own cache for named clients only

    def _ask(self, path: str, data: dict | None = None) -> dict:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self.server + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise Failed(f"{self.server} refused the workflow: {_refusal(error.read())}") from error
        except (urllib.error.URLError, OSError) as error:
            raise Failed(f"no ComfyUI answers at {self.server} ({error}); start it or give --server") from error

    def run(self, prompt: dict) -> dict:
        """The history entry of a prompt in API form, once it has ended in whatever way."""
        prompt_id = self._ask("/prompt", {"prompt": prompt, "client_id": self.id})["prompt_id"]
        while True:
            if entry := self._ask(f"/history/{prompt_id}").get(prompt_id):
                return entry
            time.sleep(POLL_SECONDS)


def _refusal(body: bytes) -> str:
    """ComfyUI's own words for a workflow that it does not take."""
    try:
        said = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")[:300]
    details = [e["message"] + ": " + e["details"] for n in said.get("node_errors", {}).values() for e in n["errors"]]
    return "; ".join(details) or said.get("error", {}).get("message", str(said))


def text_node(workflow: dict) -> str:
    """The id of the node that holds the positive prompt: the first with a text behind a positive input."""
    for name in POSITIVE:
        for node in workflow.values():
            link = node["inputs"].get(name)
            while isinstance(link, list):
                inputs = workflow[link[0]]["inputs"]
                if isinstance(inputs.get("text"), str):
                    return link[0]
                link = next((inputs[n] for n in POSITIVE if isinstance(inputs.get(n), list)), None)
    raise Failed("no text was found behind a sampler's positive input; name its node with --node")


def report_of(entry: dict) -> tuple[dict, bool]:
    """The run report of a history entry, and whether ComfyUI took it from its own cache without sampling."""
    for node, output in entry.get("outputs", {}).items():
        if output.get("carnator"):
            cached = [data.get("nodes", []) for name, data in entry["status"]["messages"] if name == "execution_cached"]
            return output["carnator"][0]["report"], any(node in nodes for nodes in cached)
    raise Failed("the workflow has no Carnator Report node")


def seconds_of(entry: dict) -> float | None:
    """From the start to the end of a prompt on the server."""
    times = {name: data.get("timestamp") for name, data in entry["status"]["messages"]}
    start, end = times.get("execution_start"), times.get("execution_success")
    return (end - start) / 1000 if start and end else None


def row(prompt: str, entry: dict) -> dict:
    """What is told about one prompt. `Failed` when it did not end well."""
    if entry["status"]["status_str"] != "success":
        errors = [data.get("exception_message", name) for name, data in entry["status"]["messages"] if "err" in name]
        raise Failed(f"{prompt!r} failed: {' '.join(errors) or entry['status']['status_str']}")
    report, cached = report_of(entry)
    decision = "unchanged" if cached else report["decision"]
    reason = "ComfyUI's own cache answered, nothing was sampled" if cached else report["reason"]
    told = {key: report[key] for key in ("risk", "threshold", "speedup", "donor", "written")}
    return {"prompt": prompt, "decision": decision, "seconds": seconds_of(entry), "reason": reason, **told}


def line(told: dict) -> str:
    """One row for people."""
    risk = "-" if told["risk"] is None else f"{told['risk']:.2f}"
    seconds = "-" if told["seconds"] is None else f"{told['seconds']:.1f} s"
    return f"{told['decision']:<12} {risk:>5} {seconds:>9}  {told['prompt']}  ({told['reason']})"


def results(client: Client, workflow: dict, node: str, prompts: list[str]) -> Iterator[dict]:
    """One row after another, each prompt queued when the one before has ended."""
    for prompt in prompts:
        changed = copy.deepcopy(workflow)
        changed[node]["inputs"]["text"] = prompt
        yield row(prompt, client.run(changed))


def arguments(given: list[str] | None) -> tuple[argparse.Namespace, dict, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", help="prompts, queued in this order")
    parser.add_argument("--file", type=Path, help="more prompts, one a line; empty lines and lines with # are left out")
    parser.add_argument("--workflow", type=Path, default=EMBEDDED, help="in API form (default: the embedded model's)")
    parser.add_argument("--server", default="http://127.0.0.1:8188", help="default: %(default)s")
    parser.add_argument("--node", help="id of the node that takes the prompt as its text (default: found by its link)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    options = parser.parse_args(given)
    prompts = list(options.prompts)
    try:
        lines = options.file.read_text(encoding="utf-8").splitlines() if options.file else []
        workflow = json.loads(options.workflow.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    prompts += [text.strip() for text in lines if text.strip() and not text.startswith("#")]
    if not prompts:
        parser.error("give prompts or --file")
    if not isinstance(workflow, dict) or "nodes" in workflow:
        parser.error(f"{options.workflow} is not in API form; export it with 'Export (API)'")
    if options.node is not None and options.node not in workflow:
        parser.error(f"{options.workflow} holds no node {options.node}")
    return options, workflow, prompts


def main(given: list[str] | None = None) -> int:
    options, workflow, prompts = arguments(given)
    try:
        node = options.node or text_node(workflow)
        if not options.json:
            print(f"{'decision':<12} {'risk':>5} {'time':>9}  prompt")
        for told in results(Client(options.server), workflow, node, prompts):
            print(json.dumps(told) if options.json else line(told), flush=True)
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
