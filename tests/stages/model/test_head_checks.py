"""A head that its files lack, or that is not the embedding that it should be, is found by `pipe
check`, as loading would find it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.errors import StageError
from pipeline.testing import plan_view
from stages.model.compat import causal_types
from stages.model.hf import HfModel
from stages.model.source_text_compat import tied_names, ties_by_default
from tests.support.models import FAMILIES, context, filled, random_source

PLAN = plan_view({})
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def saved(folder: Path, family: str, *, shards: bool = False) -> dict[str, Tensor]:
    """Save a model; return the tensors of its file."""
    model = filled(random_source(FAMILIES[family], folder))
    model.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
    return {} if shards else load_file(folder / "model.safetensors")


def configured(folder: Path, **changes: Any) -> None:
    """Change the config; None removes a key."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: one for key, one in config.items() if one is not None}))


def store(folder: Path, tensors: dict[str, Tensor]) -> None:
    whole = {name: one.contiguous() for name, one in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


def found(folder: Path, **fields: Any) -> list[str]:
    return [str(one) for one in HfModel(path=str(folder), **fields).check(PLAN) if not one.warning]


def loads(folder: Path, **fields: Any) -> bool:
    try:
        HfModel(path=str(folder), **fields).run(context(folder)).weights().close()
    except StageError:
        return False
    return True


@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "gemma"])
def test_two_matrices_where_the_config_shares_one(family: str, tmp_path: Path) -> None:
    """gemma's config says nothing, since sharing is its default."""
    tensors = saved(tmp_path, family)
    names = tied_names(FAMILIES[family]["model_type"])
    assert names is not None
    configured(tmp_path, tie_word_embeddings=None if family == "gemma" else True)
    assert found(tmp_path) == []
    (embedding,) = (one for one in tensors if f".{one}".endswith(f".{names[1]}"))
    store(tmp_path, {**tensors, names[0]: tensors[embedding].clone()})
    assert found(tmp_path) == []
    other = tensors[embedding].clone()
    other[len(other) // 2] += 1
    store(tmp_path, {**tensors, names[0]: other})
    (said,) = found(tmp_path)
    assert said.startswith(f"path: the model shares one tensor between {names[0]} and {embedding}")
    assert not loads(tmp_path)
    configured(tmp_path, tie_word_embeddings=False)
    assert found(tmp_path) == []
    assert loads(tmp_path)


@pytest.mark.parametrize("shards", [False, True])
def test_no_head(shards: bool, tmp_path: Path) -> None:
    tensors = saved(tmp_path, "llama_tied", shards=shards)
    assert HEAD not in tensors
    configured(tmp_path, tie_word_embeddings=False)
    (said,) = found(tmp_path)
    assert said.startswith(f"path: {tmp_path} has no {HEAD}, and the model does not share")
    assert not loads(tmp_path)
    for fields in ({"new_weights": (HEAD,)}, {"new_weights": ("lm_*",)}, {"init": "random"}):
        assert found(tmp_path, **fields) == []
        assert loads(tmp_path, **fields)


def test_no_head_of_a_model_without_the_prefix(tmp_path: Path) -> None:
    """As the base model of transformers is saved."""
    model = filled(random_source(FAMILIES["llama"], tmp_path))
    model.model.save_pretrained(tmp_path)
    (said,) = found(tmp_path)
    assert HEAD in said
    assert not loads(tmp_path)


def test_a_head_under_another_name_is_left_to_loading(tmp_path: Path) -> None:
    tensors = saved(tmp_path, "llama")
    tensors["output.weight"] = tensors.pop(HEAD)
    store(tmp_path, tensors)
    assert found(tmp_path) == []


def test_a_damaged_file_is_left_to_loading(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert found(tmp_path) == []


def test_what_the_types_say_of_themselves() -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    known = 0
    for kind in causal_types():
        stated = ties_by_default(kind)
        if stated is None or kind == "moss_transcribe_diarize":  # its parts differ
            continue
        try:
            live = CONFIG_MAPPING[kind]().get_text_config().tie_word_embeddings
        except Exception:  # of a type that refuses its own default, or has several texts
            continue
        assert stated == live, kind
        known += 1
    assert known > 100
    for family in ("llama", "gpt2", "gemma2"):
        kind = FAMILIES[family]["model_type"]
        config = CONFIG_MAPPING[kind](**{**FAMILIES[family], "model_type": kind})
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        assert {tied_names(kind)} == set(model._tied_weights_keys.items())


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    saved(tmp_path, "gemma")
    code = (
        "import sys; from stages.model.hf import HfModel; from stages.model import weight_checks;"
        f"list(weight_checks.head_problems(HfModel(path={str(tmp_path)!r})));"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
