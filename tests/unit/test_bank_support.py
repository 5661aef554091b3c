"""Requests, drafts and child processes for the tests of the bank; and the tests of the text vector."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from carnator_core.bank import Bank, EntryDraft, text_vector
from carnator_core.request import Identity, Profile, Request

SHAPE = (1, 4, 2, 6, 6)
COMPUTED = {"computed": True, "decision": "miss", "steps": 10, "dense_seconds": 60.0}


def rows(seed: int, width: int = 32) -> torch.Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(seed))


def request(seed: int = 0, weights: str = "model", shape: tuple = SHAPE, text: torch.Tensor | None = None) -> Request:
    profile = Profile(
        conditioning=rows(seed) if text is None else text,
        noise=f"noise-{seed}",
        sigmas=tuple(1 - i / 10 for i in range(11)),
        sampler="euler",
        prompt=f"prompt {seed}",
        seed=seed,
    )
    return Request(Identity(weights, shape, "torch.float32", "flow", 5.0), profile)


def draft(seed: int = 0, **change) -> EntryDraft:
    asked = change.pop("request", None) or request(seed)
    shape, generator = asked.identity.latent_shape, torch.Generator().manual_seed(1000 + seed)
    values = {
        "request": asked,
        "signature": {"states": torch.randn(3, 8, generator=generator), "count": torch.tensor(7)},
        "predictions": torch.randn(4, *shape, generator=generator),
        "prediction_sigmas": (0.9, 0.6, 0.3, 0.1),
        "result": torch.randn(*shape, generator=generator),
        "provenance": COMPUTED,
    }
    return EntryDraft(**{**values, **change})


def fork(work: Callable[[], int | None]) -> int:
    """Run something in a child of this process; its pid. The child exits with what it returns, 70 on an exception."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        code = work() or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def index_equals_folder(bank: Bank) -> None:
    infos = {info.id: info.bytes for info in bank.ls()}
    folders = {p.name: sum(f.stat().st_size for f in p.iterdir()) for p in (bank.root / "entries").glob("*")}
    assert infos == folders


def used_bytes(root: Path) -> int:
    return sum(p.stat().st_size for p in root.rglob("*") if p.is_file())


def test_text_vector_is_a_unit_vector_of_at_most_384():
    for width in (8, 384, 385, 4096):
        vector = text_vector(rows(1, width))
        assert vector.dtype == np.float16 and vector.shape == (min(width, 384),)
        assert abs(np.linalg.norm(vector.astype(np.float32)) - 1) < 2e-3


def test_projection_keeps_angles_and_is_fixed():
    a = rows(1, 4096)
    b = a + 0.3 * rows(2, 4096)
    true = float(torch.cosine_similarity(a.mean(0), b.mean(0), dim=0))
    near = float(text_vector(a).astype(np.float32) @ text_vector(b).astype(np.float32))
    assert abs(true - near) < 0.03
    ones = text_vector(torch.ones(1, 4096))
    assert np.sign(ones[:12]).tolist() == [-1, -1, -1, 1, -1, 1, 1, -1, 1, -1, 1, 1]


@pytest.mark.parametrize("bad", [torch.zeros(0, 4), torch.zeros(4), torch.full((2, 4), float("nan"))])
def test_text_vector_refuses(bad):
    with pytest.raises(ValueError):
        text_vector(bad)


def test_zero_text_has_no_direction():
    assert not text_vector(torch.zeros(3, 16)).any()
