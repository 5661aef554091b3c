"""ComfyUI inside the test process, with the pack loaded the way ComfyUI loads it."""

from __future__ import annotations

import asyncio
import copy
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.host.sampling import GENEROUS, WEIGHTS

ROOT = Path(__file__).parents[2]
EXTRAS = ("nodes_custom_sampler", "nodes_hunyuan", "nodes_model_advanced")  # stock nodes that tests use


class Host:
    """ComfyUI's own modules and the loaded pack."""

    def __init__(self, comfyui: Path, base: Path):
        sys.path.insert(0, str(comfyui))  # before the repository, whose nodes/ would hide ComfyUI's nodes.py
        from comfy.cli_args import args

        args.cpu, args.base_directory = True, str(base)
        importlib.import_module("utils.install_util")
        self.nodes = importlib.import_module("nodes")
        self.folder_paths = importlib.import_module("folder_paths")
        for name in EXTRAS:
            assert self._load(comfyui / "comfy_extras" / f"{name}.py", "comfy_extras")
        self.folders_before = copy.deepcopy(self.folder_paths.folder_names_and_paths)
        self.classes_before = set(self.nodes.NODE_CLASS_MAPPINGS)
        link = base / "custom_nodes" / "an odd name-1.2"
        link.parent.mkdir()
        link.symlink_to(ROOT, target_is_directory=True)
        assert self._load(link, "custom_nodes")
        self.pack = sys.modules[str(link).replace(".", "_x_")]

    def _load(self, path: Path, parent: str) -> bool:
        return asyncio.run(self.nodes.load_custom_node(str(path), module_parent=parent))

    def module(self, name: str) -> ModuleType:
        """A module of the loaded pack, such as "carnator_core.mini.text": never a second copy of the core."""
        return importlib.import_module(f"{self.pack.__name__}.{name}")

    def run(self, node: str, **inputs) -> tuple:
        """The outputs of a node, stock or ours, of either node API, called as the executor calls it."""
        cls = self.nodes.NODE_CLASS_MAPPINGS[node]
        output = getattr(cls(), cls.FUNCTION)(**inputs)
        return output if isinstance(output, tuple) else output.result


@pytest.fixture(scope="session")
def host(comfyui, tmp_path_factory) -> Host:
    """ComfyUI, imported once for all in-process tests, on the CPU and with a base folder of its own."""
    return Host(comfyui, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def model(host):
    """The embedded model, loaded by ComfyUI's own loader."""
    (loaded,) = host.run("UNETLoader", unet_name=WEIGHTS, weight_dtype="default")
    return host.run("ModelSamplingSD3", model=loaded, shift=3.0)[0]


@pytest.fixture(scope="session")
def generous(host) -> str:
    """A policy that judges nothing away, so that tests do not hang on how good today's weights are."""
    policy = host.module("carnator_core.gate.policy")
    policy.POLICIES["strict"] = policy.Policy("strict", -1.0, 3, 9.0, regions=2)
    policy.POLICIES[GENEROUS] = policy.Policy(GENEROUS, 1.1, 3, 9.0, regions=2)
    return GENEROUS


@pytest.fixture
def cache(host, generous, request):
    """An empty cache of the test's own; with it comes the generous policy."""
    name = "".join(c if c.isalnum() else "_" for c in request.node.name)[:80]
    return host.run("CarnatorReuseCache", name=name, budget_gb=1.0, mode="on")[0]
