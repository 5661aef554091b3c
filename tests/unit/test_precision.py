"""The precision of the embedded model's products, for benchmarks."""

from __future__ import annotations

import torch

from carnator_core.mini import model as mini
from carnator_core.mini.precision import multiplying_in


def predicted(model) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    x, text = torch.randn(1, 16, 2, 4, 4, generator=draw), torch.randn(1, 8, 4096, generator=draw)
    with torch.no_grad():
        return model(x, torch.tensor([500.0]), text, return_dict=False)[0]


def test_only_the_model_changes_its_precision_and_its_predictions_stay_float32():
    exact = predicted(mini.load())
    model = multiplying_in(mini.load(), "bfloat16")
    found = predicted(model)
    assert found.dtype == torch.float32 and 0 < (found - exact).norm() < 0.1 * exact.norm()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(predicted(multiplying_in(mini.load(), "float32")), exact)
