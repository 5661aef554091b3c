"""In which precision the embedded model multiplies matrices, for commands that run it thousands of times."""

from __future__ import annotations

import argparse
from typing import TypeVar

import torch

PRECISIONS = ("float32", "bfloat16")
M = TypeVar("M", bound=torch.nn.Module)


def add_precision_option(parser: argparse.ArgumentParser) -> None:
    """--dtype."""
    text = "of the model's matrix products; bfloat16 is several times faster on a CPU with AMX (default: %(default)s)"
    parser.add_argument("--dtype", choices=PRECISIONS, default=PRECISIONS[0], help=text)


def multiplying_in(model: M, precision: str) -> M:
    """The same model, its products in one of `PRECISIONS`; its predictions stay float32, and so does all around it.

    Only the model: what samples, answers and judges is measured in full precision whatever the model runs in.
    """
    if precision == "float32":
        return model
    plain = model.forward

    def forward(*args, **kwargs):
        with torch.autocast(model.device.type, torch.bfloat16):
            (prediction,) = plain(*args, **{**kwargs, "return_dict": False})
        return (prediction.float(),)

    model.forward = forward
    return model
