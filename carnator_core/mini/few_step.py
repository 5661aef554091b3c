"""The few-step companion: the embedded model with its LoRA, four unguided Euler steps instead of fifty guided ones.

Sample it with `sample.sample(few_step.load(), prompts, seeds, steps=few_step.STEPS, guidance=few_step.GUIDANCE)`.
"""

from __future__ import annotations

from pathlib import Path

from ..request import digest_of_weights
from . import lora
from . import model as mini

# Apart from the weights: ComfyUI lists every file below a folder of models as a model.
LORA = mini.WEIGHTS.parents[1] / "loras" / "carnator_mini_fewstep_lora.safetensors"
STEPS = 4
GUIDANCE = 1.0
BASE = "base"  # metadata: digest of the weights that the LoRA was distilled from


def load(weights: Path = mini.WEIGHTS, companion: Path = LORA):
    """The embedded model with the LoRA merged, in float32.

    FileNotFoundError when a file is missing and ValueError when the LoRA was distilled from other weights; both name
    the command that makes one.
    """
    command = f"python -m carnator_core.mini.distill --teacher {weights}"
    if not companion.is_file():
        raise FileNotFoundError(f"no few-step LoRA at {companion}; distil one with: {command}")
    model = mini.load(weights)
    found = lora.load(companion)
    if found.metadata.get(BASE) != digest_of_weights(model.state_dict().items()):
        raise ValueError(f"{companion} was distilled from other weights than {weights}; make its own with: {command}")
    lora.merge(model, found)
    return model
