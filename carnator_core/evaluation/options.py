"""What the benchmarks on pairs of requests are all asked: how many, which, on which grid."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ..mini import few_step
from ..mini import model as mini
from ..mini.evaluate import GRIDS
from ..mini.precision import add_precision_option, multiplying_in
from ..mini.seeds import RANGES
from .traces import KINDS

SEEDS = 100  # of every split


def add_pair_options(parser: argparse.ArgumentParser, pairs: int, grid: str, split: str = "proof") -> None:
    """--pairs, --grid, --steps, --split, --json; with these defaults."""
    parser.add_argument("--pairs", type=int, default=pairs)
    parser.add_argument("--grid", choices=GRIDS, default=grid)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--split", choices=RANGES, default=split)
    parser.add_argument("--json", action="store_true")


def add_case_options(parser: argparse.ArgumentParser) -> None:
    """--kind, --seed, --weights, --dtype."""
    add_precision_option(parser)
    parser.add_argument("--kind", choices=KINDS, default="one-word")
    parser.add_argument("--seed", type=int, default=0, help="0 to 99: which pairs and noises of the split")
    parser.add_argument("--weights", type=Path, default=mini.WEIGHTS)


def load_model(options: argparse.Namespace) -> torch.nn.Module:
    """The embedded model that --weights and --dtype name, or its few-step companion."""
    few = getattr(options, "few_step", False)
    return multiplying_in(few_step.load(options.weights) if few else mini.load(options.weights), options.dtype)


def check(options: argparse.Namespace) -> None:
    """ValueError for numbers that name no pairs."""
    if options.pairs < 1 or not 0 <= getattr(options, "seed", 0) < SEEDS:
        raise ValueError(f"--pairs must be at least 1 and --seed from 0 to {SEEDS - 1}")
