"""What a miss costs inside ComfyUI: Carnator's own seconds over the rest of the same run, on the embedded model.

    COMFYUI_PATH=~/comfy/ComfyUI python -m tests.host.overhead [--size 256 --frames 17 --steps 20 8 4 --donors 10]

Run it with ComfyUI's Python, from the repository. Each row is the median of `--repeat` misses, every one judged against
as many donors of the same noise as `--donors` says and then written to the bank.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.host.conftest import Host

SEED, POLICY = 7, "refuses"


class Misses:
    """The embedded model behind a Carnator node whose gate refuses every donor, so that each new prompt is a miss."""

    def __init__(self, comfyui: Path, base: Path, size: int, frames: int):
        self.host = Host(comfyui, base)
        policy = self.host.module("carnator_core.gate.policy")
        policy.POLICIES[POLICY] = policy.Policy(POLICY, -1.0, 3, 9.0)
        (model,) = self.host.run("UNETLoader", unet_name="carnator_mini_t2v.safetensors", weight_dtype="default")
        (self.model,) = self.host.run("ModelSamplingSD3", model=model, shift=3.0)
        (self.latent,) = self.host.run("EmptyHunyuanLatentVideo", width=size, height=size, length=frames, batch_size=1)
        self.world, self.rng = self.host.module("carnator_core.mini.world"), random.Random(SEED)

    def bank(self, steps: int):
        """The model with an empty bank of its own."""
        (cache,) = self.host.run("CarnatorReuseCache", name=f"overhead {steps}", budget_gb=1.0, mode="on")
        return self.host.run("Carnator", model=self.model, policy=POLICY, cache=cache)[0]

    def run(self, model, steps: int) -> tuple[float, float, dict]:
        """Carnator's seconds, the run's whole seconds, and the report."""
        prompt = self.world.caption(self.world.random_scene(self.rng))
        positive, negative = (self.host.run("CarnatorEmbeddedText", text=text)[0] for text in (prompt, ""))
        started = time.perf_counter()
        (latent,) = self.host.run(
            "KSampler",
            model=model,
            seed=SEED,
            steps=steps,
            cfg=2.0,
            sampler_name="euler",
            scheduler="simple",
            positive=positive,
            negative=negative,
            latent_image=self.latent,
            denoise=1.0,
        )
        whole = time.perf_counter() - started
        told = json.loads(self.host.run("CarnatorReport", model=model, samples=latent)[1].split("\n", 1)[1])
        assert told["decision"] == "miss" and told["written"], told
        return told["seconds"]["carnator"], whole, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=256, help="pixels as ComfyUI counts them: latents have an eighth")
    parser.add_argument("--frames", type=int, default=17, help="as ComfyUI counts them: 1 and a multiple of 4")
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 8, 4])
    parser.add_argument("--donors", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    comfyui = Path(os.environ.get("COMFYUI_PATH", Path.home() / "comfy" / "ComfyUI"))
    with tempfile.TemporaryDirectory() as base:
        misses = Misses(comfyui, Path(base), options.size, options.frames)
        print(f"latents {tuple(misses.latent['samples'].shape)}, {torch.get_num_threads()} threads, seed {SEED}")
        for steps in options.steps:
            model = misses.bank(steps)
            for _ in range(options.donors):
                misses.run(model, steps)
            found = [misses.run(model, steps) for _ in range(options.repeat)]
            own, whole = (statistics.median(row[i] for row in found) for i in (0, 1))
            share = statistics.median(row[0] / (row[1] - row[0]) for row in found)
            judged = f"{options.donors} to {options.donors + options.repeat - 1} donors"
            print(f"{steps:3} steps, {judged}: own {own:.3f} s of {whole:.2f} s, {share:.1%} of the rest", flush=True)


if __name__ == "__main__":
    sys.exit(main())
