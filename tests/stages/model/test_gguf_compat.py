"""The quicker readers of GGUF files find what the package's own finds."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFEndian, GGUFReader

from stages.model.gguf_compat import QuickReader, TensorsOnly, read_quickly

TOKENS, SCORES = ["<s>", "", "größer", "a" * 300], [0.5, -1.0, 2.25]


@pytest.fixture(params=list(GGUFEndian), ids=lambda order: order.name)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write metadata of every form and two tensors, in one of the byte orders."""
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=request.param)
    writer.add_context_length(77)
    writer.add_token_list(TOKENS)
    writer.add_token_scores(SCORES)
    writer.add_bool("own.flag", True)
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(reader: Any) -> list[Any]:
    return [
        (one.name, one.tensor_type, one.shape.tolist(), one.data_offset, one.data.tolist())
        for one in reader.tensors
    ]


def test_a_quick_reader_finds_all_fields_and_tensors(file: Path) -> None:
    own, quick = GGUFReader(file), QuickReader(file)
    assert tensors(quick) == tensors(own)
    assert list(quick.fields) == list(own.fields)
    for name, field in own.fields.items():
        found = quick.fields[name]
        assert (found.offset, found.data, found.types) == (field.offset, field.data, field.types)
        assert [part.tolist() for part in found.parts] == [part.tolist() for part in field.parts]
    assert quick.get_field("tokenizer.ggml.tokens").contents() == TOKENS
    assert quick.get_field("tokenizer.ggml.scores").contents() == SCORES


def test_a_reader_of_tensors_finds_all_but_the_values_of_arrays(file: Path) -> None:
    own, only = GGUFReader(file), TensorsOnly(file)
    assert tensors(only) == tensors(own)
    assert list(only.fields) == list(own.fields)
    arrays = {"tokenizer.ggml.tokens", "tokenizer.ggml.scores"}
    for name, field in only.fields.items():
        assert field.data == ([] if name in arrays else own.fields[name].data)
    assert only.get_field("llama.context_length").contents() == 77


@pytest.mark.parametrize("reader", [QuickReader, TensorsOnly])
def test_a_file_that_ends_too_early_is_refused(file: Path, reader: Any) -> None:
    whole = file.read_bytes()
    for size in range(24, len(whole) - 40, 7):
        file.write_bytes(whole[:size])
        with pytest.raises((ValueError, IndexError)):
            reader(file)


def test_transformers_reads_quickly(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    made = []
    monkeypatch.setattr(
        QuickReader, "__init__", lambda self, *given: made.append(GGUFReader.__init__(self, *given))
    )
    with read_quickly():
        found = load_gguf_checkpoint(str(file))
    assert found["config"]["max_position_embeddings"] == 77
    assert len(made) == 1


def test_others_read_quickly_in_the_body_alone() -> None:
    with read_quickly():
        assert gguf.GGUFReader is QuickReader
    assert gguf.GGUFReader is GGUFReader
    with contextlib.suppress(KeyError), read_quickly():
        raise KeyError
    assert gguf.GGUFReader is GGUFReader
