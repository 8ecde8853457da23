"""GGUF files: any range of dequantized tensors, at the cost of the rows that it touches."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.contracts.model import TensorReader, TensorSpec
from stages.model import gguf as product
from stages.model.gguf import GgufTensors, quantization
from stages.model.hf import HfModel
from stages.weights import converted
from tests.support.gguf import finish, write_llama, write_tensors
from tests.support.models import context, filled, random_source, tiny_llama_config
from tests.support.readers import FLOATS, ranges, raw, require_cast, require_range
from tests.support.tier import times

ROWS, WIDTH = 11, 96
ROW_BYTES = {
    Kind.F32: 4 * WIDTH,
    Kind.F16: 2 * WIDTH,
    Kind.BF16: 2 * WIDTH,
    Kind.Q8_0: WIDTH // 32 * 34,
    Kind.Q4_0: WIDTH // 32 * 18,
}
"""Bytes of a block of 32: a scale in fp16 and its numbers."""
NAMES = {kind: f"matrix.{kind.name}" for kind in ROW_BYTES}
VECTOR, CUBE = "vector", "cube"


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.fixture(scope="module", autouse=True)
def _small_chunks() -> Iterator[None]:
    """Let a chunk be three rows of fp32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product, "CHUNK", 3 * 4 * WIDTH + 5)
        yield


@pytest.fixture(scope="module")
def file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.gguf")
        tensors = {NAMES[kind]: (drawn(ROWS, WIDTH), kind) for kind in ROW_BYTES}
        tensors[VECTOR] = (drawn(WIDTH), Kind.F32)
        tensors[CUBE] = (drawn(3, 5, WIDTH), Kind.Q8_0)
        write_tensors(path, tensors)
        yield path


def whole(file: Path, name: str) -> Tensor:
    """Return the full tensor as the format's own package reads it."""
    stored = next(one for one in gguf.GGUFReader(file).tensors if one.name == name)
    values = gguf.dequantize(stored.data, stored.tensor_type).astype(np.float32)
    return torch.from_numpy(values.copy())


def test_names_and_shapes(file: Path) -> None:
    reader = GgufTensors(file)
    assert reader.architecture == "llama"
    assert sorted(reader.names()) == sorted([*NAMES.values(), VECTOR, CUBE])
    for name in NAMES.values():
        assert reader.spec(name) == TensorSpec((ROWS, WIDTH), torch.float32)
    assert reader.spec(VECTOR).shape == (WIDTH,)
    assert reader.spec(CUBE).shape == (3, 5, WIDTH)


@pytest.mark.parametrize("name", [*NAMES.values(), VECTOR, CUBE])
@given(dtype=FLOATS, data=st.data())
def test_any_range_costs_the_rows_that_it_touches(
    file: Path, name: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    reader, full = GgufTensors(file), whole(file, name)
    start, stop = data.draw(ranges(full.numel()))
    require_range(reader, name, full, (start, stop))
    kind = next((kind for kind, stored in NAMES.items() if stored == name), None)
    if kind is not None:
        touched = -(-stop // WIDTH) - start // WIDTH if start < stop else 0
        assert reader.bytes_read == 2 * touched * ROW_BYTES[kind]
    require_cast(reader, name, full, (start, stop), dtype)


def test_what_is_read_may_be_changed(file: Path) -> None:
    reader = GgufTensors(file)
    for name in NAMES.values():
        reader.read(name).zero_()
        assert raw(reader.read(name)) == raw(whole(file, name))


# A model whose matrices are quantized.


@pytest.fixture(scope="module", params=[Kind.F32, Kind.Q8_0, Kind.Q4_0], ids=lambda k: k.name)
def llama(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Any]]:
    config = tiny_llama_config(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16,
    )  # fmt: skip
    model = filled(random_source(config, Path()))
    with tempfile.TemporaryDirectory() as folder:
        write_llama(Path(folder, "tiny.gguf"), model, request.param)
        yield Path(folder, "tiny.gguf"), model


def opened(file: Path) -> TensorReader:
    return HfModel(path=str(file)).run(context(Path())).weights()


def test_the_model_is_what_transformers_makes_of_the_file(llama: tuple[Path, Any]) -> None:
    from transformers import AutoModelForCausalLM

    file, _ = llama
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    reader = opened(file)
    for name, tensor in theirs.state_dict().items():
        assert raw(reader.read(name)) == raw(tensor), name
    reader.close()


def test_the_model_is_the_one_that_was_written(llama: tuple[Path, Any]) -> None:
    """Values agree up to the numbers of a block's scale: 4 bits are 8 steps to the largest."""
    file, model = llama
    reader = opened(file)
    for name, tensor in model.state_dict().items():
        limit = float(tensor.abs().max()) / 7
        torch.testing.assert_close(reader.read(name), tensor, rtol=0, atol=limit, msg=name)
    reader.close()


@pytest.mark.parametrize("worthwhile", [0, converted.WORTHWHILE])
def test_any_range_of_the_model(llama: tuple[Path, Any], worthwhile: int) -> None:
    """Heads are permuted by rows, so their parts are read row by row, or whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(converted, "WORTHWHILE", worthwhile)
        reader = opened(llama[0])
        full = {name: reader.read(name) for name in reader.names()}

        @given(name=st.sampled_from(sorted(full)), data=st.data())
        def any_range(name: str, data: st.DataObject) -> None:
            require_range(reader, name, full[name], data.draw(ranges(full[name].numel())))

        any_range()
        reader.close()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Write metadata of every form and two tensors."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_context_length(77)
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.5, -1.0, 2.25])
    writer.add_bool("own.flag", True)
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.arange(5, dtype=np.float16))
    finish(writer)
    return tmp_path / "x.gguf"


TOKENS = ["<s>", "", "größer", "a" * 300]


def test_transformers_reads_quickly_what_the_package_reads(written: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    own = gguf.GGUFReader(written)
    with product.quick_gguf():
        quick = gguf.GGUFReader(written)
        found = load_gguf_checkpoint(str(written))
    assert type(quick) is not type(own)
    assert gguf.GGUFReader is type(own)
    assert found["config"]["max_position_embeddings"] == 77
    assert list(quick.fields) == list(own.fields)
    for name, field in own.fields.items():
        same = quick.fields[name]
        assert (same.offset, same.data, same.types) == (field.offset, field.data, field.types)
        assert [part.tolist() for part in same.parts] == [part.tolist() for part in field.parts]
    assert quick.get_field("tokenizer.ggml.tokens").contents() == TOKENS
    ours = GgufTensors(written)
    for theirs, one in zip(own.tensors, quick.tensors, strict=True):
        assert (one.name, one.data.tolist()) == (theirs.name, theirs.data.tolist())
        assert ours.read(one.name).tolist() == theirs.data.tolist()
    whole = written.read_bytes()
    for size in range(24, len(whole) - 40, times(quick=70, full=7)):
        written.write_bytes(whole[:size])
        with pytest.raises((ValueError, IndexError)), product.quick_gguf():
            gguf.GGUFReader(written)
        assert gguf.GGUFReader is type(own)


def test_the_type_of_most_weights_is_named(tmp_path: Path) -> None:
    def written(**kinds: tuple[int, Any]) -> str:
        writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
        for name, (rows, kind) in kinds.items():
            values = np.zeros((rows, 64), np.float32)
            data = values if kind is None else gguf.quantize(values, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        finish(writer)
        return quantization(tmp_path / "x.gguf")

    assert written(a=(8, Kind.Q4_1), b=(4, Kind.Q8_0), c=(2, None)) == "Q4_1"
    assert written(a=(8, Kind.Q4_1), c=(16, None)) == ""
