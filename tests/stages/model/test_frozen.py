"""Parameters that the patterns of a model slot freeze."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import StageError
from pipeline.testing import plan_view
from stages.adapter.lora import Lora
from stages.export.safetensors import ExportSafetensors
from stages.model.declared import outline
from stages.model.hf import HfModel
from tests.support.exports import stored
from tests.support.gguf import write_llama
from tests.support.models import FAMILIES, context, filled, random_source, tiny_llama_config
from tests.support.moe import MOE
from tests.support.weights import MemoryWeights
from tests.support.weights import trained as changed


def saved(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    filled(random_source(config, folder)).to(dtype).save_pretrained(folder / "model")
    return folder / "model"


def opened(folder: Path, *frozen: str, **fields: Any) -> Any:
    return HfModel(path=str(folder), frozen=frozen, **fields).run(context(folder))


def trained_names(source: Any) -> set[str]:
    named = outline(source).named_parameters(remove_duplicate=False)
    return {name for name, one in named if one.requires_grad}


def checkpoint(source: Any) -> MemoryWeights:
    """Return changed weights as a checkpoint has them, without those that are frozen."""
    every = changed(source)
    kept = {name: one for name, one in every.tensors.items() if name not in source.frozen_base}
    return MemoryWeights(kept)


def test_a_shared_tensor_is_frozen_by_either_name(tmp_path: Path) -> None:
    place = saved(tmp_path, FAMILIES["llama_tied"])
    both = {"model.embed_tokens.weight", "lm_head.weight"}
    for name in both:
        source = opened(place, name)
        assert source.frozen_base == both
        assert not both & trained_names(source)
        source.tie(model := source.build())
        assert not model.lm_head.weight.requires_grad
    assert not opened(place).frozen_base


def test_other_views_keep_what_is_frozen_apart(tmp_path: Path) -> None:
    source = opened(saved(tmp_path, FAMILIES["llama"]), "model.layers.0.*")
    assert len(source.frozen_base) == 9
    assert not source.inference_view.frozen_base
    assert trained_names(source.inference_view) == trained_names(source) | source.frozen_base


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("model.layer.0.*", r"frozen: 'model.layer.0.\*' matches no parameter of the model \(they "
         r"are called model\.layers\.\d\.\S+, model\.layers"),
        ("model.embed_token.weight", r"\(they are called model\.embed_tokens\.weight, "),
        ("*", r"frozen: \* matches all parameters, and none is left to train \(leave it out"),
    ],
)  # fmt: skip
def test_patterns_that_cannot_be_meant(pattern: str, told: str, tmp_path: Path) -> None:
    place = saved(tmp_path, FAMILIES["llama"])
    with pytest.raises(StageError, match=told):
        opened(place, pattern)


def problems(**fields: Any) -> list[str]:
    model = HfModel(**fields)
    return [p.message for p in model.check(plan_view({"model": model})) if p.key == "frozen"]


def test_a_check_sees_patterns_of_nothing_and_of_random_weights(tmp_path: Path) -> None:
    place = str(saved(tmp_path, FAMILIES["llama"]))
    assert problems(path=place, frozen=("model.*",)) == []
    assert problems(path=place, frozen=("", "**")) == [
        "'' matches no parameter", "'**' matches all parameters",
    ]  # fmt: skip
    assert problems(path=place, frozen=("lm_*",), new_weights=("lm_head.weight",)) == [
        "lm_head.weight, which new_weights draws at random, would stay as they are"
    ]
    [message] = problems(path=place, frozen=("model.embed_tokens.*",), vocab_size=140)
    assert message.startswith("9 rows of model.embed_tokens.weight, which are new and random")
    assert problems(path=place, frozen=("model.layers.*",), vocab_size=140) == []


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gpt2", "experts"])
def test_an_export_has_frozen_tensors_as_they_were(kind: str, tmp_path: Path) -> None:
    config = MOE["qwen3_moe"] if kind == "experts" else FAMILIES[kind]
    place = saved(tmp_path, config, torch.bfloat16)
    frozen = {"experts": ("*.experts.*",), "gpt2": ("transformer.h.0.*", "*wpe*")}
    source = opened(place, *frozen.get(kind, ("*.layers.0.*", "lm_head.*")))
    ctx = context(tmp_path)
    ExportSafetensors(folder=str(tmp_path / "out")).run(ctx, checkpoint(source), source)
    before, after = load_file(place / "model.safetensors"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {one.dtype for one in after.values()} == {torch.bfloat16}
    if kind == "experts":
        assert same == {name for name in before if ".experts." in name}
    elif kind == "llama_tied":
        assert same == {n for n in before if ".layers.0." in n or "embed_tokens" in n}
    else:
        assert same == {name for name in before if name in source.frozen_base}
    assert same


def test_a_gguf_file(tmp_path: Path) -> None:
    model = filled(random_source(tiny_llama_config(num_key_value_heads=6), tmp_path))
    write_llama(tmp_path / "model.gguf", model)
    source = opened(tmp_path / "model.gguf", "model.layers.1.*")
    assert len(source.frozen_base) == 9
    weights = source.merge_trained(checkpoint(source))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(weights.read(name), source.weights().read(name))


def test_a_frozen_embedding_of_another_size(tmp_path: Path) -> None:
    place = saved(tmp_path, FAMILIES["llama"])
    source = opened(place, "model.embed_tokens.*", vocab_size=120)
    ctx = context(tmp_path)
    ExportSafetensors(folder=str(tmp_path / "out"), dtype="fp32").run(
        ctx, checkpoint(source), source
    )
    before = load_file(place / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(stored(tmp_path / "out")["model.embed_tokens.weight"], before[:120])


def test_an_adapter_on_a_model_with_frozen_parameters(tmp_path: Path) -> None:
    source = opened(saved(tmp_path, FAMILIES["llama"]), "model.layers.0.*")
    adapted = Lora(rank=2, targets=("q_proj",)).run(context(tmp_path), source)
    assert len(adapted.trained) == 4
    assert len(trained_names(adapted)) == 4
    weights = MemoryWeights({name: torch.ones(adapted.outline.get_parameter(name).shape)
                             for name in adapted.trained})  # fmt: skip
    merged = adapted.merge_trained(weights)
    plain = source.inference_view.weights()
    assert set(merged.names()) == set(plain.names())
    changes = {n for n in plain.names() if not torch.equal(merged.read(n), plain.read(n))}
    assert changes == {f"model.layers.{n}.self_attn.q_proj.weight" for n in range(2)}
    with pytest.raises(StageError, match=r"train_also: model\.layers\.0\.\S+ is frozen by the mo"):
        Lora(train_also=("*norm.weight",)).run(context(tmp_path), source)
