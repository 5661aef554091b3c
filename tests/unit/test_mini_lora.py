from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.func import functional_call

from carnator_core.mini import keys, lora
from carnator_core.mini import model as mini


def small(seed: int = 0):
    torch.manual_seed(seed)
    return mini.build(num_attention_heads=1, num_layers=1, ffn_dim=64).eval().requires_grad_(False)


def trained(model, rank: int = 4, seed: int = 0) -> lora.Lora:
    """A LoRA that changes every weight it covers."""
    found = lora.start(model, rank, seed)
    generator = torch.Generator().manual_seed(seed)
    for _, up in found.pairs.values():
        up.data.copy_(0.1 * torch.randn(up.shape, generator=generator))
    return found


@pytest.fixture(scope="module")
def inputs():
    torch.manual_seed(1)
    return torch.randn(1, 16, 5, 8, 8), torch.tensor([500.0]), torch.randn(1, 6, 4096)


def test_a_new_lora_changes_nothing(inputs):
    model = small()
    before = model(*inputs, return_dict=False)[0]
    lora.merge(model, lora.start(model, 4, 0))
    assert torch.equal(model(*inputs, return_dict=False)[0], before)


def test_applying_and_merging_agree_and_applying_leaves_the_model_alone(inputs):
    model = small()
    change = trained(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    applied = functional_call(model, lora.changed_weights(model, change), inputs, {"return_dict": False})[0]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    plain = model(*inputs, return_dict=False)[0]
    lora.merge(model, change)
    merged = model(*inputs, return_dict=False)[0]
    torch.testing.assert_close(merged, applied)
    assert (merged - plain).abs().max() > 1e-3


@settings(max_examples=5)
@given(st.floats(-2, 2), st.floats(-2, 2))
def test_strengths_add_up(first, second):
    one, other = small(), small()
    change = trained(one)
    lora.merge(one, change, first)
    lora.merge(one, change, second)
    lora.merge(other, change, first + second)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_every_factor_learns(inputs):
    model = small()
    change = trained(model)
    out = functional_call(model, lora.changed_weights(model, change), inputs, {"return_dict": False})[0]
    out.pow(2).mean().backward()
    assert all(f.grad is not None and f.grad.abs().max() > 0 for f in change.parameters())


def test_the_file_changes_wan_weights_as_comfyui_computes_it(tmp_path):
    """ComfyUI adds alpha / rank * lora_B @ lora_A to the weight named in front of `.lora_A`; without alpha, scale 1."""
    model = small()
    change = trained(model)
    lora.save(change, tmp_path / "x.safetensors")
    file = load_file(tmp_path / "x.safetensors")
    host = {f"diffusion_model.{k}": v.clone() for k, v in keys.to_original(model.state_dict()).items()}
    stems = {k.rsplit(".lora_", 1)[0] for k in file}
    assert {v.dtype for v in file.values()} == {torch.bfloat16} and not any("alpha" in k for k in file)
    assert {"diffusion_model.blocks.0.self_attn.q", "diffusion_model.blocks.0.cross_attn.o"} <= stems
    assert {"diffusion_model.blocks.0.ffn.2", "diffusion_model.time_projection.1", "diffusion_model.head.head"} <= stems
    for stem in stems:
        up, down = file[f"{stem}.lora_B.weight"].float(), file[f"{stem}.lora_A.weight"].float()
        host[f"{stem}.weight"] += torch.mm(up.flatten(1), down.flatten(1)).reshape(host[f"{stem}.weight"].shape)
    lora.merge(model, lora.load(tmp_path / "x.safetensors"))
    for name, value in keys.to_original(model.state_dict()).items():
        torch.testing.assert_close(value, host[f"diffusion_model.{name}"])


def test_saving_what_was_loaded_gives_the_same_file(tmp_path):
    change = trained(small())
    change.metadata = {"steps": "4"}
    lora.save(change, tmp_path / "a.safetensors")
    lora.save(lora.load(tmp_path / "a.safetensors"), tmp_path / "b.safetensors")
    a, b = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert set(a) == set(b) and all(torch.equal(a[k], b[k]) for k in a)
    with safe_open(tmp_path / "b.safetensors", framework="pt") as file:
        assert file.metadata()["steps"] == "4"


def test_alpha_scales_by_the_rank(tmp_path):
    model = small()
    lora.save(trained(model), tmp_path / "plain.safetensors")
    state = load_file(tmp_path / "plain.safetensors")
    for key in [k for k in state if "lora_A" in k]:
        state[key.replace("lora_A.weight", "alpha")] = torch.tensor(state[key].shape[0] / 2)
    save_file(state, tmp_path / "half.safetensors")
    whole, half = (lora.load(tmp_path / f"{n}.safetensors") for n in ("plain", "half"))
    for name, weight in lora.changed_weights(model, half).items():
        torch.testing.assert_close(weight, lora.changed_weights(model, whole, 0.5)[name])


@pytest.mark.parametrize("size", [{}, dict(num_attention_heads=1, num_layers=8)])
def test_the_file_stays_below_two_megabytes(tmp_path, size):
    with torch.device("meta"):
        model = mini.build(**size)
    change = lora.start(model, 32, 0)
    change.pairs = {n: tuple(torch.zeros(f.shape) for f in pair) for n, pair in change.pairs.items()}
    lora.save(change, tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").stat().st_size <= 2_000_000


def test_a_lora_of_another_size_is_refused_and_the_model_stays_as_it_was():
    model = small()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    wide = mini.build(num_attention_heads=1, num_layers=1, ffn_dim=128)
    with pytest.raises(ValueError, match="ffn"):
        lora.merge(model, trained(wide))
    deep = mini.build(num_attention_heads=1, num_layers=2, ffn_dim=64)
    with pytest.raises(ValueError, match=r"blocks\.1.*missing"):
        lora.merge(model, trained(deep))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_files_of_another_form_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(FileNotFoundError):
        lora.load(path)
    factor = torch.zeros(2, 2)
    save_file({"lora_unet_blocks_0_ffn_0.lora_down.weight": factor}, path)
    with pytest.raises(ValueError, match="lora_unet_blocks_0_ffn_0"):
        lora.load(path)
    save_file({"diffusion_model.blocks.0.ffn.0.lora_A.weight": factor}, path)
    with pytest.raises(ValueError, match="both"):
        lora.load(path)
    save_file({f"diffusion_model.img_emb.proj.1.lora_{x}.weight": factor.clone() for x in "AB"}, path)
    with pytest.raises(KeyError, match="img_emb"):
        lora.load(path)
