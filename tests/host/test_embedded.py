"""The embedded model inside ComfyUI: loaded, sampled and decoded by the host's own nodes and the pack's two."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image

ROOT = Path(__file__).parents[2]
WEIGHTS = "carnator_mini_t2v.safetensors"
PROMPT = "one large red ball moving left over the sea, steady camera"
MATCHING = dict(steps=4, cfg=2.0, sampler_name="euler", scheduler="simple", denoise=1.0)


@pytest.fixture(scope="module")
def model(host):
    (loaded,) = host.run("UNETLoader", unet_name=WEIGHTS, weight_dtype="default")
    return host.run("ModelSamplingSD3", model=loaded, shift=3.0)[0]


def text(host, prompt: str):
    return host.run("CarnatorEmbeddedText", text=prompt)[0]


def empty(host, batch: int = 1, size: int = 128):
    return host.run("EmptyHunyuanLatentVideo", width=size, height=size, length=17, batch_size=batch)[0]


def sampled(host, model, seed: int = 7, **changes):
    inputs = dict(positive=text(host, PROMPT), negative=text(host, ""), latent_image=empty(host), **MATCHING)
    return host.run("KSampler", model=model, seed=seed, **{**inputs, **changes})[0]


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    return -10 * math.log10((a - b).pow(2).mean().item() + 1e-20)


def test_loading_the_pack_adds_its_nodes_its_bank_folder_and_two_model_folders_and_nothing_else(host):
    added = set(host.nodes.NODE_CLASS_MAPPINGS) - host.classes_before
    assert {"CarnatorEmbeddedText", "CarnatorEmbeddedDecode"} <= added
    assert all(name.startswith("Carnator") for name in added)
    after = host.folder_paths.folder_names_and_paths
    before = host.folders_before
    assert set(after) - set(before) == {"carnator"}  # the caches
    assert {name for name in before if after[name] != before[name]} == {"diffusion_models", "loras"}
    (paths, kinds), (old_paths, old_kinds) = after["diffusion_models"], before["diffusion_models"]
    assert paths[:-1] == old_paths and kinds == old_kinds  # behind the user's own folders
    assert WEIGHTS in host.nodes.UNETLoader.INPUT_TYPES()["required"]["unet_name"][0]


def test_every_node_has_a_description_a_help_page_and_a_tooltip_on_each_input_and_output(host):
    for name in set(host.nodes.NODE_CLASS_MAPPINGS) - host.classes_before:
        cls = host.nodes.NODE_CLASS_MAPPINGS[name]
        schema = cls.define_schema()
        assert schema.node_id == name and schema.description and schema.category.startswith("carnator")
        assert (ROOT / "web" / "docs" / f"{name}.md").is_file()
        for part in (*schema.inputs, *schema.outputs):
            assert part.tooltip, (name, part.id)


def test_the_text_node_gives_the_embedding_of_the_core(host):
    (entry,) = text(host, PROMPT)
    embedding, options = entry
    assert embedding.shape == (1, 32, 4096) and options == {}
    assert torch.equal(embedding, host.module("carnator_core.mini.text").encode([PROMPT]))


def test_decoding_undoes_the_hosts_scaling_of_wan_latents_and_lays_clips_end_to_end(host):
    from comfy.latent_formats import Wan21

    clip = torch.rand(2, 3, 5, 32, 32) * 2 - 1
    latent = Wan21().process_out(host.module("carnator_core.mini.codec").encode(clip))
    (frames,) = host.run("CarnatorEmbeddedDecode", samples={"samples": latent})
    assert frames.shape == (10, 32, 32, 3)
    expected = (clip.permute(0, 2, 3, 4, 1).flatten(0, 1) + 1) / 2
    assert torch.allclose(frames, expected, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 48, 5, 16, 16), (1, 4, 64, 64)])
def test_other_models_latents_are_refused_with_a_sentence(host, shape):
    with pytest.raises(ValueError, match="their own VAE"):
        host.run("CarnatorEmbeddedDecode", samples={"samples": torch.zeros(shape)})


def test_the_hosts_sampler_gives_the_clip_of_the_core_at_the_settings_the_help_page_names(host, model):
    ours = host.module("carnator_core.mini.model").load()
    reference = host.module("carnator_core.mini.sample").sample(ours, [PROMPT], [7], steps=4)
    clip = host.module("carnator_core.mini.codec").decode(reference)
    expected = (clip.permute(0, 2, 3, 4, 1).flatten(0, 1) + 1) / 2
    (frames,) = host.run("CarnatorEmbeddedDecode", samples=sampled(host, model))
    assert psnr(frames, expected) > 80  # two implementations of one model, apart by rounding alone
    (others,) = host.run("CarnatorEmbeddedDecode", samples=sampled(host, model, scheduler="normal"))
    assert psnr(others, expected) < 50


def test_same_seed_same_latent_other_seed_another(host, model):
    first, again, other = (sampled(host, model, seed=seed, steps=2)["samples"] for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_batch_of_two_on_the_large_grid_decodes_to_ten_frames(host, model):
    latent = sampled(host, model, latent_image=empty(host, batch=2, size=256), steps=2)
    (frames,) = host.run("CarnatorEmbeddedDecode", samples=latent)
    assert frames.shape == (10, 64, 64, 3)
    assert frames.isfinite().all() and frames.min() >= 0 and frames.max() <= 1 and frames.std() > 0.05


def test_a_started_server_serves_the_nodes_their_help_pages_and_the_workflow(server):
    assert "Cannot import" not in "\n".join(line for line in server.log().splitlines() if "carnator" in line)
    info = server.get("/object_info/UNETLoader")["UNETLoader"]["input"]["required"]["unet_name"]
    assert WEIGHTS in (info[0] if isinstance(info[0], list) else info[1]["options"])
    for name in ("CarnatorEmbeddedText", "CarnatorEmbeddedDecode"):
        assert server.get(f"/object_info/{name}")[name]["category"] == "carnator/embedded"
        assert server.text(f"/extensions/carnator/docs/{name}.md").startswith("# Carnator Embedded")
    assert "embedded" in server.get("/workflow_templates")["carnator"]


def test_the_embedded_workflow_runs_through_the_api_and_writes_a_clip(server):
    prompt = json.loads((ROOT / "workflows" / "api" / "embedded.json").read_text(encoding="utf-8"))
    prompt["6"]["inputs"]["steps"] = 4
    entry = server.run(prompt)
    (saved,) = entry["outputs"]["9"]["images"]
    path = server.base / "output" / saved["subfolder"] / saved["filename"]
    with Image.open(path) as clip:
        assert clip.n_frames == 5 and clip.size == (256, 256)
    assert len(entry["outputs"]["9"]["animated"]) == 1
