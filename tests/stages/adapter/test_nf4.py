"""The model's own weights in 4 bits: encoding, reading and export."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from pipeline.errors import StageError
from stages.adapter.lora import Lora, QuantType
from stages.adapter.nf4 import (
    BLOCK,
    PackedLinear,
    packed_bytes,
    packed_reader,
    rounded_reader,
    unpack,
)
from stages.export.safetensors import ExportAdapter, ExportSafetensors
from stages.model.hf import HfModel
from stages.weights.views import MemoryReader
from tests.stages.adapter.test_source import GPT2, UNTIED
from tests.support.adapters import adapted, logits, module_with, trained
from tests.support.models import context
from tests.support.runs import TINY
from tests.support.tier import spread
from tests.support.weights import MemoryWeights

WIDE = {**UNTIED, "hidden_size": 64, "intermediate_size": 128}
"""Sizes whose rows are whole blocks, which bitsandbytes' own layers need."""
KINDS: tuple[QuantType, ...] = ("nf4", "fp4")
SHAPES = ((1, 1), (3, 5), (5, 13), (7, 64), (24, 100), (64, 65))


def weight_of(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[1]))


def packed_of(weight: torch.Tensor, kind: QuantType = "nf4") -> torch.Tensor:
    return packed_reader(MemoryReader({"one.weight": weight}), {"one"}, kind).read("one.packed")


def rounded_of(weight: torch.Tensor, kind: QuantType = "nf4") -> torch.Tensor:
    return rounded_reader(MemoryReader({"one.weight": weight}), {"one"}, kind).read("one.weight")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", spread(SHAPES, 3))
def test_each_element_is_the_nearest_of_sixteen_values_times_its_block_s_largest(
    shape: tuple[int, int], kind: QuantType
) -> None:
    weight = weight_of(shape)
    table = bitsandbytes.functional.get_4bit_type(kind, device="cpu")
    found = rounded_of(weight, kind).view(-1)
    for first in range(0, weight.numel(), BLOCK):
        block = weight.view(-1)[first : first + BLOCK]
        nearest = (block[:, None] / block.abs().max() - table).abs().amin(1) * block.abs().max()
        torch.testing.assert_close((found[first : first + BLOCK] - block).abs(), nearest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_packed_comes_out_rounded(
    shape: tuple[int, int], held: torch.dtype, kind: QuantType
) -> None:
    packed = packed_of(weight_of(shape), kind)
    assert packed.shape == (packed_bytes(shape[0] * shape[1]),)
    found = unpack(packed.view(held), shape, kind, torch.float32)
    assert torch.equal(found, rounded_of(weight_of(shape), kind))
    again = rounded_of(found, kind)
    assert torch.equal(again, found)


@given(data=st.data(), shape=st.sampled_from(SHAPES), kind=st.sampled_from(KINDS))
def test_any_range_is_that_of_the_whole(data: Any, shape: tuple[int, int], kind: QuantType) -> None:
    base = MemoryReader({"one.weight": weight_of(shape)})
    for reader, name in (
        (packed_reader(base, {"one"}, kind), "one.packed"),
        (rounded_reader(base, {"one"}, kind), "one.weight"),
    ):
        whole = reader.read(name).view(-1)
        start = data.draw(st.integers(0, whole.numel() - 1))
        out = torch.empty(data.draw(st.integers(1, whole.numel() - start)), dtype=whole.dtype)
        reader.read_into(name, start, out)
        assert torch.equal(out, whole[start : start + out.numel()])


def test_large_weights_are_read_some_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed_bytes(4096 * 4096) * 8 == 4.5 * 4096 * 4096  # bits an element
    weight = weight_of((24, 100))
    packed, rounded = packed_of(weight), rounded_of(weight)
    monkeypatch.setattr("stages.adapter.nf4.STEP", 2 * BLOCK)
    assert torch.equal(packed_of(weight), packed)
    assert torch.equal(rounded_of(weight), rounded)
    reader = packed_reader(MemoryReader({"one.weight": weight}), {"one"}, "nf4")
    sizes = [chunk.numel() for chunk in reader.chunks("one.packed", 0, packed.numel())]
    assert max(sizes) == BLOCK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_layer_multiplies_by_the_rounded_weight(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(100, 24)
    with torch.no_grad():
        plain.weight.copy_(weight_of((24, 100)))
    layer = PackedLinear(plain, "nf4")
    layer.packed.data = packed_of(plain.weight.detach()).view(dtype)
    plain.weight.data = rounded_of(plain.weight.detach())
    plain.to(dtype)
    x = torch.randn(2, 3, 100, dtype=dtype, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = layer(x)
    assert [tuple(one.shape) for one in kept] == [tuple(layer.packed.shape)]
    torch.testing.assert_close(found, plain(x))
    torch.testing.assert_close(layer.weight, plain.weight.detach())
    direction = torch.randn_like(found)
    (gradient,) = torch.autograd.grad(found, x, direction)
    (expected,) = torch.autograd.grad(plain(x), x, direction)
    torch.testing.assert_close(gradient, expected)


def test_all_linear_layers_but_the_head_are_packed_and_lent(tmp_path: Path) -> None:
    source = adapted(tmp_path, UNTIED, rank=2, targets=("q_proj",), quantize="nf4")
    names = dict(source.build().named_parameters())
    packed = {name for name, one in names.items() if one.dtype == torch.uint8}
    assert len(packed) == TINY["num_hidden_layers"] * 7
    assert all(name.endswith(".packed") for name in packed)
    assert "model.layers.0.self_attn.q_proj.base_layer.packed" in packed
    assert "lm_head.weight" in names
    assert packed <= set(source.frozen_base)
    assert all("lora_" in name for name in source.trained)


@pytest.mark.parametrize("fields", [{"rank": 4}, {"rank": 3, "dora": True, "quantize": "fp4"}])
def test_the_merged_model_computes_what_the_packed_one_does(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    source = adapted(tmp_path, UNTIED, **{"quantize": "nf4", **fields})
    weights = trained(source)
    done = ExportSafetensors(dtype="fp32").run(context(tmp_path), weights, source)
    merged = AutoModelForCausalLM.from_pretrained(done.folder).eval()
    expected = logits(module_with(source, weights))
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=2e-5)
    told: list[str] = []
    ExportSafetensors.verify(done.folder, told.append, trust_remote_code=False)
    assert "computes what it did" in told[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_an_adapter_onto_bitsandbytes_own_model(kind: QuantType, tmp_path: Path) -> None:
    source = adapted(tmp_path, WIDE, rank=4, quantize=kind)
    weights = trained(source)
    done = ExportAdapter().run(context(tmp_path), weights, source)
    assert f'bnb_4bit_quant_type="{kind}"' in (done.folder / "README.md").read_text()
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=torch.float32
    )
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(
        done.folder, dtype=torch.float32, quantization_config=config
    )
    assert any(isinstance(one, bitsandbytes.nn.Linear4bit) for one in loaded.modules())
    expected = logits(module_with(source, weights))
    loaded.train()  # in eval mode its kernels on CPUs compute in bf16
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=2e-5)


def test_a_fresh_adapter_of_packed_weights_changes_nothing(tmp_path: Path) -> None:
    source = adapted(tmp_path, UNTIED, rank=2, dora=True, quantize="nf4")
    rounded = logits(module_with(source.base.inference_view, MemoryWeights({})))
    torch.testing.assert_close(
        logits(module_with(source, MemoryWeights({}))), rounded, rtol=0, atol=2e-6
    )
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    assert (rounded - logits(original)).abs().max() > 1e-3


def test_what_cannot_be_in_4_bits(tmp_path: Path) -> None:
    also = {"targets": ("q_proj",), "train_also": ("*.down_proj.*",)}
    with pytest.raises(StageError, match=r"mlp\.down_proj\.packed is in 4 bits"):
        adapted(tmp_path, UNTIED, quantize="nf4", **also).weights()
    with pytest.raises(StageError, match="no linear layers to hold in 4 bits"):
        adapted(tmp_path, GPT2, quantize="nf4", targets=("c_attn",)).weights()


def test_other_weights_are_another_model(tmp_path: Path) -> None:
    base = HfModel(config=TINY, init="random").run(context(tmp_path))
    made = [Lora(quantize=kind).run(context(tmp_path), base) for kind in (None, *KINDS)]
    assert len({source.fingerprint for source in made}) == 3
    assert len({source.base.fingerprint for source in made}) == 3


@pytest.mark.parametrize("function", spread(["bitsandbytes", "import_peft"], 1))
def test_no_code_is_fetched_when_bitsandbytes_is_imported(function: str) -> None:
    """bitsandbytes would fetch code if `kernels` were installed."""
    program = f"""
import importlib.machinery, sys, types
kernels = types.ModuleType("kernels")
kernels.__spec__ = importlib.machinery.ModuleSpec("kernels", None)
kernels.get_kernel = lambda *a, **k: sys.exit("asked for a kernel")
sys.modules["kernels"] = kernels
from stages.adapter.compat import {function}
{function}()
assert "bitsandbytes" in sys.modules
assert sys.modules["kernels"] is kernels
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
