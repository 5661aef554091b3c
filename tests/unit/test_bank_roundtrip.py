from __future__ import annotations

import torch

from carnator_core.bank import Bank, EntryDraft
from carnator_core.request import Identity, Profile, Request


def test_a_result_comes_back_bit_equal_after_reopening(tmp_path):
    result = torch.randn(1, 16, 2, 4, 4)
    request = Request(
        Identity("w", tuple(result.shape), "torch.float32", "flow", 4.0),
        Profile(torch.randn(5, 64), "n", (1.0, 0.5, 0.0), "euler"),
    )
    draft = EntryDraft(
        request=request,
        signature={"x0": torch.randn(1, 16, 2, 4, 4), "conditioning": request.profile.conditioning},
        predictions=torch.randn(2, 1, 16, 2, 4, 4),
        prediction_sigmas=[1.0, 0.5],
        result=result,
        provenance={"computed": True, "decision": "miss"},
    )
    entry = Bank(tmp_path).write(draft)
    assert entry is not None
    assert torch.equal(Bank(tmp_path).result(entry), result)
