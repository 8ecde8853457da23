"""Configs of well-known models, and headers of GGUF files, whole and damaged."""

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
from stages.model.assets import open_config
from stages.model.gguf import GgufTensors
from stages.model.hf import HfModel
from stages.model.read import gguf_header, known_config, read_config
from tests.support.gguf import write_tensors
from tests.support.tier import spread

KNOWN = {
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-3-medium-4k-instruct": 13_960_238_080,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-pt": 999_885_952,
    "allenai/OLMo-2-0425-1B-Instruct": 1_484_916_736,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "allenai/OLMo-2-0325-32B": 32_234_279_936,
    "ibm-granite/granite-3.1-2b-base": 2_533_531_648,
    "ibm-granite/granite-3.1-8b-instruct": 8_170_848_256,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "EleutherAI/pythia-160m": 162_322_944,
    "EleutherAI/pythia-1b": 1_011_781_632,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "EleutherAI/pythia-12b": 11_846_072_320,
    "EleutherAI/gpt-neox-20b": 20_554_567_680,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
}
"""Number of parameters in the files, by hub id."""


@pytest.mark.parametrize("repo", spread(list(KNOWN), 6))
def test_well_known_models_have_the_known_number_of_parameters(repo: str) -> None:
    from transformers import AutoModelForCausalLM

    config = known_config(repo)
    assert config is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(open_config(HfModel(config=config), None))
    model.tie_weights()
    assert sum(one.numel() for one in model.parameters()) == KNOWN[repo]


U32, STRING, ARRAY = 4, 8, 9
HUGE = 1 << 60
SIZES = {"embedding_length": 64, "feed_forward_length": 96, "block_count": 2,
         "attention.head_count": 4}  # fmt: skip


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
    (folder / "model.gguf").write_bytes(content)
    return read_config(HfModel(path=str(folder / "model.gguf")))


def shapes(file: Path) -> dict[str, tuple[int, ...]]:
    return {name: one.shape for name, one in gguf_header(file).tensors.items()}


def test_arrays_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    words = array("words", STRING, 2, text("a") + text("bc"))
    rows = array("rows", U32, 3, bytes(12))
    file.write_bytes(header([words, rows, number("x", 7)], [tensor("t", 5, 6)]))
    assert gguf_header(file).metadata == {"words": None, "rows": None, "x": 7}
    assert shapes(file) == {"t": (5, 6)}


ENDS = "ends in its header"
DAMAGED = {
    "magic": (b"GGML" + bytes(20), "it is not a GGUF file"),
    "version 1": (header(version=1), "GGUF version 1 is not known"),
    "other byte order": (header(version=3 << 24), "GGUF version 50331648 is not known"),
    "fewer tensors": (header(counts=(HUGE, 0)), ENDS),
    "fewer pairs": (header(counts=(0, HUGE)), ENDS),
    "long name": (header([struct.pack("<Q", HUGE)]), ENDS),
    "long array": (header([array("x", U32, HUGE)]), ENDS),
    "many words": (header([array("x", STRING, HUGE)]), ENDS),
    "long word": (header([array("x", STRING, 1, struct.pack("<Q", HUGE))]), ENDS),
    "nested": (header([array("x", ARRAY, 1)]), "arrays of arrays"),
    "twice": (header([number("x", 1), number("x", 2)]), "it says 'x' twice"),
    "type": (header([array("x", 99, 1)]), "no type 99 in GGUF"),
    "no dimensions": (header((), [tensor("t")]), "t has 0 dimensions"),
    "many dimensions": (header((), [tensor("t", 1, 2, 3, 4, 5)]), "t has 5 dimensions"),
    "no tensors": (header(), r"no tensor 'token_embd\.weight'"),
    "alignment": (header([number("general.alignment", 0)]), "aligned to 0 bytes"),
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


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.1, 0.5, 0.9, 0.9999])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, share: float) -> None:
    whole = tmp_path / "whole.gguf"
    write_tensors(whole, {name: (torch.zeros(64, 32), Kind.Q8_0) for name in ("a", "b")})
    assert shapes(whole) == {"a": (32, 64), "b": (32, 64)}
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[: int(whole.stat().st_size * share)])
    with pytest.raises(StageError, match=rf"^{cut} cannot be read as GGUF: .*copy it again\)$"):
        GgufTensors(cut)
