"""Mistakes about weights that `pipe check` finds in the headers of files, as loading would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import StageError
from stages.model.compat import tied_names
from tests.support.model_folders import HEAD, configured, edit, found, opened, saved, tensors_of
from tests.support.models import FAMILIES


def loads(folder: Path, **fields: Any) -> bool:
    try:
        opened(folder, **fields).weights().close()
    except StageError:
        return False
    return True


@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "gemma"])
def test_two_matrices_where_the_config_shares_one(family: str, tmp_path: Path) -> None:
    """gemma's config says nothing, since sharing is its default."""
    saved(tmp_path, family)
    tensors, path = tensors_of(tmp_path), str(tmp_path)
    names = tied_names(FAMILIES[family]["model_type"])
    assert names is not None
    configured(tmp_path, tie_word_embeddings=None if family == "gemma" else True)
    assert found(path=path) == []
    (embedding,) = (one for one in tensors if f".{one}".endswith(f".{names[1]}"))
    edit(tmp_path, lambda t: t.update({names[0]: tensors[embedding].clone()}))
    assert found(path=path) == []
    edit(tmp_path, lambda t: t[names[0]][len(t[names[0]]) // 2].add_(1))
    (said,) = found(path=path)
    assert said.startswith(f"path: the model shares one tensor between {names[0]} and {embedding}")
    assert not loads(tmp_path)
    configured(tmp_path, tie_word_embeddings=False)
    assert found(path=path) == []
    assert loads(tmp_path)


@pytest.mark.parametrize("shards", [False, True])
def test_no_head(shards: bool, tmp_path: Path) -> None:
    saved(tmp_path, "llama_tied", max_shard_size="20KB" if shards else "1GB")
    assert shards or HEAD not in tensors_of(tmp_path)
    configured(tmp_path, tie_word_embeddings=False)
    (said,) = found(path=str(tmp_path))
    assert said.startswith(f"path: {tmp_path} has no {HEAD}, and the model does not share")
    assert not loads(tmp_path)
    for fields in ({"new_weights": (HEAD,)}, {"new_weights": ("lm_*",)}, {"init": "random"}):
        assert found(path=str(tmp_path), **fields) == []
        assert loads(tmp_path, **fields)


def test_no_head_of_a_model_without_the_prefix(tmp_path: Path) -> None:
    """As the base model of transformers is saved."""
    saved(tmp_path).model.save_pretrained(tmp_path)
    (said,) = found(path=str(tmp_path))
    assert HEAD in said
    assert not loads(tmp_path)


def test_what_cannot_be_told_is_left_to_loading(tmp_path: Path) -> None:
    saved(tmp_path)
    edit(tmp_path, lambda t: t.update({"output.weight": t.pop(HEAD)}))  # perhaps an older name
    assert found(path=str(tmp_path)) == []
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert found(path=str(tmp_path)) == []


def test_patterns_of_nothing_and_of_random_weights(tmp_path: Path) -> None:
    saved(tmp_path)

    def frozen(*patterns: str, **fields: Any) -> list[str]:
        problems = found(path=str(tmp_path), frozen=patterns, **fields)
        return [one.removeprefix("frozen: ").split(" (")[0] for one in problems]

    assert frozen("model.*") == []
    assert frozen("", "**") == ["'' matches no parameter", "'**' matches all parameters"]
    assert frozen("lm_*", new_weights=(HEAD,)) == [
        "lm_head.weight, which new_weights draws at random, would stay as they are"
    ]
    [message] = frozen("model.embed_tokens.*", vocab_size=140)
    assert message.startswith("9 rows of model.embed_tokens.weight, which are new and random")
    assert frozen("model.layers.*", vocab_size=140) == []


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    saved(tmp_path, "gemma")
    code = (
        "import sys; from stages.model.hf import HfModel; from stages.model import weight_checks;"
        f"list(weight_checks.head_problems(HfModel(path={str(tmp_path)!r})));"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
