"""Folders that the pack registers, and what of ours outlives a run."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from pathlib import Path

import pytest


@pytest.fixture
def folders(host):
    """ComfyUI's table of folders, put back afterwards."""
    table = host.folder_paths.folder_names_and_paths
    before = copy.deepcopy(table)
    yield host.folder_paths
    table.clear()
    table.update(before)


def test_the_few_step_lora_is_listed_where_it_exists(host, folders, tmp_path):
    paths = host.module("nodes.host.paths")
    before = list(folders.get_folder_paths("loras"))
    paths.register(tmp_path)
    assert folders.get_folder_paths("loras") == before
    (tmp_path / paths.LORA).write_bytes(b"")
    paths.register(tmp_path)
    assert folders.get_folder_paths("loras") == [*before, str(tmp_path)]  # behind the user's own
    assert paths.LORA in folders.get_filename_list("loras")
    assert paths.LORA not in folders.get_filename_list("diffusion_models")


def test_the_loras_name_is_the_one_that_the_shipped_workflow_loads_and_the_core_writes(host):
    root = Path(__file__).parents[2]
    api = json.loads((root / "workflows" / "api" / "few_step.json").read_text(encoding="utf-8"))
    (loader,) = (node["inputs"] for node in api.values() if node["class_type"] == "LoraLoaderModelOnly")
    name = host.module("nodes.host.paths").LORA
    assert loader["lora_name"] == name
    assert f'"{name}"' in (root / "carnator_core" / "mini" / "few_step.py").read_text(encoding="utf-8")


def test_nothing_of_ours_keeps_a_model_alive(host):
    """What "Free model and node cache" gives up is given up by us as well."""
    (loaded,) = host.run("UNETLoader", unet_name="carnator_mini_t2v.safetensors", weight_dtype="default")
    (cache,) = host.run("CarnatorReuseCache", name="lifetime", budget_gb=1.0, mode="on")
    (fast,) = host.run("Carnator", model=loaded, policy="fast", cache=cache)
    (text,) = host.run("CarnatorEmbeddedText", text="one large red ball moving left over the sea")
    (empty,) = host.run("EmptyHunyuanLatentVideo", width=128, height=128, length=17, batch_size=1)
    sampling = dict(steps=2, cfg=1.0, sampler_name="euler", scheduler="simple", denoise=1.0, seed=1)
    (latent,) = host.run("KSampler", model=fast, positive=text, negative=text, latent_image=empty, **sampling)
    host.run("CarnatorReport", model=fast, samples=latent)
    weights = weakref.ref(loaded.model)
    import comfy.model_management as management

    management.unload_all_models()
    management.cleanup_models()
    del loaded, fast
    gc.collect()
    assert weights() is None
