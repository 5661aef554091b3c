"""What `generate` and `demo` share: the embedded model's generator and its options."""

from __future__ import annotations

import argparse

from diffusers.utils import logging

from ..bank import Bank
from ..console import whole
from ..gate.policy import DEFAULT
from ..pipelines import Generator

SIZES = (32, 64)  # the grids that the embedded model was trained on
STEPS, MOST_STEPS = 50, 1000


def generator(bank: Bank, policy: str = DEFAULT) -> Generator:
    """Loads the weights; FileNotFoundError without them."""
    logging.set_verbosity_error()  # its advice on loading is not for who types a command
    return Generator(bank, policy)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size", type=int, choices=SIZES, default=64, help="pixels of a frame's side (default: %(default)d)"
    )
    parser.add_argument(
        "--steps", type=whole(1, MOST_STEPS), default=STEPS, help="denoising steps (default: %(default)d)"
    )
