"""What the tests of sampling runs share: prompts, ComfyUI's nodes called with usual inputs, reports."""

from __future__ import annotations

import json

import torch

WEIGHTS = "carnator_mini_t2v.safetensors"
LORA = "carnator_mini_fewstep_lora.safetensors"
PROMPT = "one large red ball moving left over the sea, steady camera"
OTHER = PROMPT.replace("ball", "cross")
STEPS = 12
GENEROUS = "generous"


def text(host, prompt: str):
    return host.run("CarnatorEmbeddedText", text=prompt)[0]


def empty(host, batch: int = 1, size: int = 128):
    return host.run("EmptyHunyuanLatentVideo", width=size, height=size, length=17, batch_size=batch)[0]


def reusing(host, model, cache, policy: str = GENEROUS):
    return host.run("Carnator", model=model, policy=policy, cache=cache)[0]


def sampled(host, model, prompt: str = PROMPT, seed: int = 7, **changes) -> dict:
    inputs = dict(positive=text(host, prompt), negative=text(host, ""), latent_image=empty(host), steps=STEPS)
    inputs |= dict(cfg=4.0, sampler_name="euler", scheduler="simple", denoise=1.0)
    return host.run("KSampler", model=model, seed=seed, **{**inputs, **changes})[0]


def report(host, model, latent: dict) -> dict:
    _, words, _ = host.run("CarnatorReport", model=model, samples=latent)
    return json.loads(words.split("\n", 1)[1])


def same(a: dict, b: dict) -> bool:
    return torch.equal(a["samples"], b["samples"])
