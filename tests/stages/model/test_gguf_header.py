"""Headers of GGUF files, whole and damaged."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from pipeline.errors import StageError
from stages.model.gguf import GgufTensors
from stages.model.hf import HfModel
from stages.model.read import gguf_header, read_config
from tests.support.gguf import write_tensors

U32, STRING, ARRAY = 4, 8, 9
HUGE = 1 << 60
SIZES = {
    "embedding_length": 64, "feed_forward_length": 96, "block_count": 2,
    "attention.head_count": 4,
}  # fmt: skip


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def number(name: str, value: int) -> bytes:
    return text(name) + struct.pack("<II", U32, value)


def array(name: str, kind: int, count: int, content: bytes = b"") -> bytes:
    return text(name) + struct.pack("<IIQ", ARRAY, kind, count) + content


def tensor(name: str, *shape: int) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", 0, 0)


def header(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    n_tensors, n_pairs = counts or (len(tensors), len(pairs))
    start = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_pairs)
    return start + b"".join(pairs) + b"".join(tensors)


def llama(*more: bytes) -> bytes:
    kind = text("general.architecture") + struct.pack("<I", STRING) + text("llama")
    sizes = [number(f"llama.{key}", value) for key, value in SIZES.items()]
    return header([kind, *sizes, *more], [tensor("token_embd.weight", 64, 100)])


def configured(content: bytes, folder: Path) -> dict[str, Any]:
    """Return the config from a file with this content."""
    file = folder / "model.gguf"
    file.write_bytes(content)
    return read_config(HfModel(path=str(file)))


def test_arrays_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    words = array("words", STRING, 2, text("a") + text("bc"))
    rows = array("rows", U32, 3, bytes(12))
    file.write_bytes(header([words, rows, number("x", 7)], [tensor("t", 5, 6)]))
    found = gguf_header(file)
    assert found.metadata == {"words": None, "rows": None, "x": 7}
    assert {name: one.shape for name, one in found.tensors.items()} == {"t": (5, 6)}


DAMAGED = {
    "magic": (b"GGML" + bytes(20), "it is not a GGUF file"),
    "version 1": (header(version=1), "GGUF version 1 is not known"),
    "other byte order": (header(version=3 << 24), "GGUF version 50331648 is not known"),
    "fewer tensors": (header(counts=(HUGE, 0)), "ends in its header"),
    "fewer pairs": (header(counts=(0, HUGE)), "ends in its header"),
    "long name": (header([struct.pack("<Q", HUGE)]), "ends in its header"),
    "long array": (header([array("x", U32, HUGE)]), "ends in its header"),
    "many words": (header([array("x", STRING, HUGE)]), "ends in its header"),
    "long word": (header([array("x", STRING, 1, struct.pack("<Q", HUGE))]), "ends in its header"),
    "nested": (header([array("x", ARRAY, 1)]), "arrays of arrays"),
    "twice": (header([number("x", 1), number("x", 2)]), "it says 'x' twice"),
    "type": (header([array("x", 99, 1)]), "no type 99 in GGUF"),
    "no dimensions": (header((), [tensor("t")]), "t has 0 dimensions"),
    "many dimensions": (header((), [tensor("t", 1, 2, 3, 4, 5)]), "t has 5 dimensions"),
    "no tensors": (header(), r"no tensor 'token_embd\.weight'"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_headers_are_named(case: str, tmp_path: Path) -> None:
    content, message = DAMAGED[case]
    began = time.perf_counter()
    with pytest.raises(StageError, match=rf"model\.gguf .*{message}"):
        configured(content, tmp_path)
    assert time.perf_counter() - began < 5


def test_every_cut_through_a_header_is_refused(tmp_path: Path) -> None:
    whole = llama(array("words", STRING, 1, text("a")))
    for size in range(len(whole)):
        with pytest.raises(StageError, match=r"model\.gguf cannot be read"):
            configured(whole[:size], tmp_path)
    assert configured(whole + bytes(4 * 64 * 100 + 31), tmp_path)


def test_a_large_file_is_not_walked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.model.read.LONGEST_HEADER", 1 << 10)
    empty_words = header([array("x", STRING, HUGE, bytes(1 << 11))])
    with pytest.raises(StageError, match="its header is too long"):
        configured(empty_words, tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.9999])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, share: float) -> None:
    whole = tmp_path / "whole.gguf"
    write_tensors(whole, {name: (torch.zeros(64, 32), Kind.Q8_0) for name in ("a", "b")})
    tensors = gguf_header(whole).tensors
    assert {name: one.shape for name, one in tensors.items()} == {"a": (32, 64), "b": (32, 64)}
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[: int(whole.stat().st_size * share)])
    with pytest.raises(StageError, match=rf"^{cut} cannot be read as GGUF: .*copy it again\)$"):
        GgufTensors(cut)
