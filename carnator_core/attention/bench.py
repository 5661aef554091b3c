"""Sparse against dense attention on this machine: python -m carnator_core.attention.bench --tokens 4608 --json.

Random tensors under made masks, or those of a real run under the masks found in them (`recorded`). Dense is torch's
scaled_dot_product_attention. Both are timed in turn, the median of their ratios counts, and the largest deviation from
dense attention under the same mask is told beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from .blocks import BlockMask, default_blocks
from .choice import timed
from .kernels import FLEX, FUSED, STEPS, backends, sparse_attention

OK, FAILED, BAD_ARGUMENTS = 0, 1, 2
REPEATS = 7
SPREAD = (0.5, 1.5)  # the heads' densities over the mean one
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COLUMNS = ("tokens", "density", "mask", "heads", "head_dim", "dtype", "backend", "speedup", "max_error")
PROGRESS_AFTER_SECONDS = 2.0


def random_mask(heads: int, tokens: int, block: tuple[int, int], density: float, seed: int = 0) -> BlockMask:
    """Blocks at random, every head of another density and every query block of another count; the mean is exact."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = -(-tokens // block[0]), -(-tokens // block[1])
    score = torch.rand(heads, rows, columns, generator=draw)
    score.scatter_(-1, score.argmax(-1, keepdim=True), 2.0)  # every query block keeps one
    keep = torch.zeros(heads, rows * columns, dtype=torch.bool)
    for head, share in enumerate(_shares(heads, density)):
        count = max(rows, round(share * rows * columns))
        keep[head, score[head].flatten().topk(count).indices] = True
    return BlockMask(keep.view(heads, rows, columns), block, (tokens, tokens))


def window_mask(heads: int, tokens: int, block: tuple[int, int], density: float, seed: int = 0) -> BlockMask:
    """One run of neighbouring key blocks for each query block, wider in some heads than in others."""
    rows, columns = -(-tokens // block[0]), -(-tokens // block[1])
    keep = torch.zeros(heads, rows, columns, dtype=torch.bool)
    for head, share in enumerate(_shares(heads, density)):
        width = min(columns, max(1, round(share * columns)))
        for row in range(rows):
            start = min(max(0, (row * columns) // rows - width // 2), columns - width)
            keep[head, row, start : start + width] = True
    return BlockMask(keep, block, (tokens, tokens))


MADE = {"random": random_mask, "window": window_mask}
RECORDED = "recorded"


def _shares(heads: int, density: float) -> list[float]:
    low, high = (0.5, 0.5) if heads == 1 else (0.0, 1.0)
    places = torch.linspace(low, high, heads).tolist()
    return [min(1.0, density * (SPREAD[0] + place * (SPREAD[1] - SPREAD[0]))) for place in places]


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per number of tokens, mask, density and back end."""
    for tokens, kind in product(args.tokens, args.mask):
        q, k, v = _tensors(tokens, kind, args)
        block = tuple(args.block or default_blocks(q.shape[2]))
        for density in args.density:
            if kind == RECORDED:
                mask = _recorded().mask_of(q, k, block, density)
            else:
                mask = MADE[kind](args.heads, tokens, block, density, args.seed)
            for backend in args.backend or backends(q):
                yield {
                    "tokens": q.shape[2],
                    "density": round(mask.density, 4),
                    "mask": kind,
                    "heads": q.shape[1],
                    "head_dim": q.shape[3],
                    "dtype": args.dtype,
                    "backend": backend,
                    "speedup": round(_speedup(q, k, v, mask, backend, args), 3),
                    "max_error": _error(q, k, v, mask, backend),
                    "block": list(block),
                    "target": density,
                    "threads": torch.get_num_threads(),
                    "clock": args.clock,
                }


def _tensors(tokens: int, kind: str, args: argparse.Namespace) -> list[torch.Tensor]:
    """q, k, v (1, heads, tokens, d); recorded ones have the embedded model's heads and at least as many tokens."""
    if kind == RECORDED:
        found = _recorded().tensors(tokens, args.seed)
    else:
        draw = torch.Generator().manual_seed(args.seed)
        found = [torch.randn(1, args.heads, tokens, args.head_dim, generator=draw) for _ in range(3)]
    return [x.to(args.device, DTYPES[args.dtype]) for x in found]


def _recorded() -> ModuleType:
    """Loaded only where it is asked for: the embedded model and its measurements build on this package."""
    from ..evaluation import recorded

    return recorded


def _speedup(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, backend: str, args: Any) -> float:
    clock, ratios = CLOCKS[args.clock], []
    sparse = partial(sparse_attention, q, k, v, mask, backend=backend)
    dense = partial(F.scaled_dot_product_attention, q, k, v)
    sparse(), dense()
    for _ in range(args.repeats):
        before = timed(dense, q.device, clock)
        ratios.append(before / timed(sparse, q.device, clock))
    return statistics.median(ratios)


def _error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, backend: str) -> float:
    """Largest deviation from dense attention in float32 under the same mask, head by head to save memory."""
    found = sparse_attention(q, k, v, mask, backend=backend)
    worst = 0.0
    for head in range(mask.heads):
        allowed = mask.with_keep(mask.keep[head : head + 1]).elements().to(q.device)
        own = [x[:, head : head + 1].float() for x in (q, k, v)]
        wanted = F.scaled_dot_product_attention(*own, attn_mask=allowed[None])
        worst = max(worst, (found[:, head : head + 1].float() - wanted).abs().max().item())
    return worst


def geometric_means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Speedup by back end, mask and asked density over all rows, and of the fastest back end of each case."""
    groups: dict[str, list[float]] = {}
    fastest: dict[tuple, float] = {}
    for row in rows:
        name, case = f"{row['mask']} {row['target']:g}", (row["mask"], row["target"], row["tokens"])
        groups.setdefault(f"{row['backend']} {name}", []).append(row["speedup"])
        fastest[case] = max(fastest.get(case, 0.0), row["speedup"])
    for (mask, target, _), speedup in fastest.items():
        groups.setdefault(f"fastest {mask} {target:g}", []).append(speedup)
    return {name: round(math.exp(statistics.fmean(map(math.log, found))), 3) for name, found in groups.items()}


def add_parser(subparsers: Any) -> None:
    """Add `attention` to the benches; leaves in `args.run` a function of args that returns the exit code."""
    text = "sparse against dense attention on this machine"
    _add_arguments(subparsers.add_parser("attention", help=text, description=text)).set_defaults(run=run)


def _add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    count, share = partial(_number, int, 2**24), partial(_number, float, 1)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ... (default: %(default)s)")
    parser.add_argument("--tokens", type=count, nargs="+", default=[4608, 8192], help="(default: %(default)s)")
    parser.add_argument("--density", type=share, nargs="+", default=[0.15, 0.3], help="(default: %(default)s)")
    parser.add_argument(
        "--mask", choices=(*MADE, RECORDED), nargs="+", default=["random", RECORDED], help="(default: %(default)s)"
    )
    parser.add_argument("--heads", type=count, default=2, help="of made masks (default: %(default)s)")
    parser.add_argument("--head-dim", type=count, default=128, help="of made masks (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default: %(default)s)")
    parser.add_argument("--block", type=count, nargs=2, metavar=("QUERIES", "KEYS"), help="(default: by token count)")
    parser.add_argument("--backend", choices=(STEPS, FUSED, FLEX), nargs="+", help="(default: all that run here)")
    parser.add_argument("--repeats", type=count, default=REPEATS, help="the median counts (default: %(default)s)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu suits one thread on a busy machine")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _number(kind: type, most: float, text: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no {kind.__name__} above 0 and at most {most:g}")
    return value


def run(args: argparse.Namespace) -> int:
    """Measure and print; the exit code."""
    from tqdm import tqdm  # only here: nothing else needs a progress bar

    if args.clock == "cpu" and (args.device != "cpu" or torch.get_num_threads() > 1):
        print("the cpu clock adds up all threads and sees no GPU; use it with OMP_NUM_THREADS=1", file=sys.stderr)
        return BAD_ARGUMENTS
    try:
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError) as error:  # torch raises either for a device that is not there
        print(f"no device {args.device!r}: {str(error).splitlines()[0]}", file=sys.stderr)
        return BAD_ARGUMENTS
    for name in args.backend or ():
        if name not in backends(torch.empty(0, device=args.device, dtype=DTYPES[args.dtype])):
            print(f"the back end {name!r} does not run with {args.dtype} on {args.device}", file=sys.stderr)
            return BAD_ARGUMENTS
    bar = tqdm(measure(args), unit="row", delay=PROGRESS_AFTER_SECONDS, file=sys.stderr, disable=args.json)
    rows = list(bar)
    means = geometric_means(rows)
    if args.json:
        print(json.dumps({"rows": rows, "geometric_mean": means}, indent=1))
        return OK
    print("  ".join(COLUMNS))
    for row in rows:
        print("  ".join(f"{row[name]:.2g}" if name == "max_error" else str(row[name]) for name in COLUMNS))
    for name, mean in means.items():
        print(f"geometric mean, {name}: {mean:.2f}")
    return OK


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m carnator_core.attention.bench", description=__doc__.split(":")[0])
    return run(_add_arguments(parser).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
