"""Measures recall on a synthetic bank without tensors: python -m carnator_core.bank.bench --entries 10000 --json."""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..console import OK, add_json_option, whole
from ..request import Identity, Profile, Request
from .files import Folder
from .index import Index, Row
from .store import Bank
from .text import DIMENSIONS, text_vector

WIDTH, LENGTH, STEPS, REPEATS = 4096, 64, 50, 200


def _request(seed: int) -> Request:
    rows = torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    sigmas = tuple(1 - i / STEPS for i in range(STEPS + 1))
    return Request(
        Identity("bench", (1, 16, 21, 60, 104), "torch.float32", "flow", 5.0),
        Profile(rows, hashlib.md5(str(seed).encode()).hexdigest(), sigmas, "euler", f"a bench prompt {seed}", seed),
    )


def _rows(count: int, request: Request) -> Iterator[Row]:
    """Rows of the size that real ones have, with random text vectors."""
    draw, identity, profile = np.random.default_rng(0), request.identity, request.profile
    card = {
        "identity": asdict(identity),
        "profile": {
            "digest": "",
            "noise": profile.noise,
            "sigmas": profile.sigmas,
            "sampler": "euler",
            "prompt": profile.prompt,
            "seed": 0,
        },
        "provenance": {"computed": True, "decision": "miss", "steps": STEPS},
        "created": 0.0,
        "carnator": "",
        "dense_seconds": 60.0,
        "prediction_sigmas": profile.sigmas[:20],
    }
    for number in range(count):
        one = hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest()
        vector = draw.standard_normal(DIMENSIONS)
        data = (vector / np.linalg.norm(vector)).astype(np.float16).tobytes()
        text = json.dumps({**card, "id": one})
        yield Row(one, identity.digest, one, one, 2**27, 0.0, 0.0, 0, 0.0, 60.0, 1, data, text)


def _fill(root: Path, count: int, request: Request) -> float:
    """An index with `count` rows and an empty folder for each; returns bytes an entry of the index file."""
    folder = Folder(root)
    folder.make()
    index = Index(folder.index)
    index.put(_rows(count, request))
    for one in index.ids():
        folder.entry(one).mkdir()
    index.shrink()
    index.close()
    return folder.index.stat().st_size / count


def _milliseconds(bank: Bank, request: Request) -> float:
    start = time.perf_counter()
    found = bank.recall(request)
    if not found:
        raise RuntimeError(f"recall found nothing: {bank.warnings}")
    return (time.perf_counter() - start) * 1e3


def measure(entries: int, repeats: int = REPEATS) -> dict[str, float | int | str]:
    """Milliseconds of the first recall of a process (index opened, compared with the folder, vectors read) and of
    later ones; each includes making the vector of the request's text."""
    requests = [_request(seed) for seed in range(8)]
    text_vector(requests[0].profile.conditioning)  # the projection is made once a process; not the index's time
    with tempfile.TemporaryDirectory() as root:
        size = _fill(Path(root), entries, requests[0])
        with Bank(root) as bank:
            cold = _milliseconds(bank, requests[0])
            warm = [_milliseconds(bank, requests[i % len(requests)]) for i in range(repeats)]
    return {
        "entries": entries,
        "cold_ms": round(cold, 2),
        "median_ms": round(float(np.median(warm)), 3),
        "p99_ms": round(float(np.percentile(warm, 99)), 3),
        "index_bytes_an_entry": round(size),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }


def add_parser(subparsers: Any) -> None:
    """Add `bank` to the benchmarks; `args.run` is a function of args that returns the exit code."""
    text = "recall on a synthetic bank without tensors: first and later milliseconds, bytes of the index"
    parser = subparsers.add_parser("bank", help=text, description=text)
    _add_arguments(parser)
    parser.set_defaults(run=run)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "entries of one identity (default: %(default)d)"
    parser.add_argument("--entries", type=whole(1, 10**7), default=10_000, help=text)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    result = measure(args.entries)
    print(json.dumps(result) if args.json else "\n".join(f"{key}: {value}" for key, value in result.items()))
    return OK


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="carnator_core.bank.bench", description=__doc__)
    _add_arguments(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
