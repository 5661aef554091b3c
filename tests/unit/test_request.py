from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from carnator_core.request import Identity, Profile, digest_of_tensor, digest_of_weights


def identity(**changes) -> Identity:
    base = Identity("w", (1, 16, 5, 16, 16), "torch.float32", "flow", 4.0)
    return replace(base, **changes)


def profile(**changes) -> Profile:
    base = Profile(torch.ones(3, 8), "n", (1.0, 0.5, 0.0), "euler")
    return replace(base, **changes)


class PackedTensor(torch.Tensor):
    """Bytes that stand for a matrix, as tensors of quantised weights do."""

    @property
    def shape(self):
        return torch.Size((20, 20))

    def detach(self):
        return self


def test_weights_digest_sees_values_names_shapes_and_dtypes_but_not_order():
    a, b = torch.randn(300, 7), torch.randn(5)
    digest = digest_of_weights([("a", a), ("b", b)])
    assert digest == digest_of_weights([("b", b), ("a", a)])
    for other in (
        [("a", a * 1.001), ("b", b)],
        [("c", a), ("b", b)],
        [("a", a.T), ("b", b)],
        [("a", a.bfloat16()), ("b", b)],
        [("a", a)],
    ):
        assert digest_of_weights(other) != digest


def test_weights_of_every_precision_and_of_quantising_wrappers_are_read():
    """fp8, tensors that call another shape their own (GGUF), and wrappers around several tensors (scaled fp8)."""
    values = torch.linspace(-3, 3, 300).view(3, 100)
    eights = [(values * s).to(torch.float8_e4m3fn) for s in (1.0, 1.0, 2.0)]
    one, same, other = (digest_of_weights([("w", t)]) for t in eights)
    assert one == same != other
    packed = [PackedTensor(torch.arange(200, dtype=torch.uint8) + i) for i in (0, 0, 1)]
    one, same, other = (digest_of_weights([("w", t)]) for t in packed)
    assert one == same != other
    pairs = [TwoTensor(values.clone(), values * s) for s in (1.0, 1.0, 2.0)]
    one, same, other = (digest_of_weights([("w", t)]) for t in pairs)
    assert one == same != other  # only the second of the wrapped tensors differs


def test_full_digest_sees_a_single_value_that_the_sample_skips():
    a = torch.randn(1000)
    b = a.clone()
    b[1] += 1
    assert digest_of_weights([("a", a)]) == digest_of_weights([("a", b)])
    assert digest_of_weights([("a", a)], full=True) != digest_of_weights([("a", b)], full=True)


def test_tensor_digest_sees_shape_and_dtype():
    a = torch.zeros(4, 2)
    assert digest_of_tensor(a) != digest_of_tensor(a.T.contiguous())
    assert digest_of_tensor(a) != digest_of_tensor(a.half())
    assert digest_of_tensor(torch.arange(6).reshape(2, 3).T) == digest_of_tensor(torch.tensor([[0, 3], [1, 4], [2, 5]]))


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": "other"},
        {"latent_shape": (1, 16, 5, 32, 32)},
        {"latent_dtype": "torch.float16"},
        {"parametrisation": "v"},
        {"guidance": 4.5},
        {"negative": "x"},
        {"extra": (("lora", "y"),)},
    ],
)
def test_every_field_of_an_identity_changes_its_digest_and_is_named(changes):
    assert identity().digest != identity(**changes).digest
    assert identity().difference(identity(**changes)) == next(iter(changes)).replace("_", " ")
    assert identity().difference(identity()) is None


def test_identity_survives_json():
    one = identity(extra=(("image", "abc"),))
    assert Identity.from_json(asdict(one)) == one


def test_unknown_parametrisation_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="flow"):
        identity(parametrisation="score")


def test_profile_digest_ignores_what_is_for_people_only():
    assert profile().digest == profile(prompt="a cat", seed=3).digest
    for changes in (
        {"conditioning": torch.ones(3, 8) * 2},
        {"noise": "m"},
        {"sigmas": (1.0, 0.4, 0.0)},
        {"sampler": "heun"},
    ):
        assert profile().digest != profile(**changes).digest
