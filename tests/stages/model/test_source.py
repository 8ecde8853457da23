"""Models from a folder and from a GGUF file; frozen parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import StageError
from stages.adapter.lora import Lora
from stages.export.safetensors import ExportSafetensors
from stages.model.declared import outline
from tests.support.exports import stored
from tests.support.gguf import write_llama
from tests.support.model_folders import (
    HEAD,
    TABLE,
    configured,
    edit,
    opened,
    refused,
    saved,
    tensors_of,
)
from tests.support.models import (
    FAMILIES,
    context,
    filled,
    logits,
    random_source,
    save_tokenizer,
    tiny_llama_config,
)
from tests.support.moe import MOE
from tests.support.weights import MemoryWeights
from tests.support.weights import trained as changed


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_as_it_was_saved(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, family)
    attention = "eager" if family == "gemma2" else "sdpa"
    assert torch.equal(logits(filled(opened(tmp_path, attention=attention))), logits(model))


def test_shards_a_dtype_and_a_model_without_the_prefix(tmp_path: Path) -> None:
    model = saved(tmp_path / "shards", max_shard_size="30KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    assert torch.equal(logits(filled(opened(tmp_path / "shards"))), logits(model))
    half = saved(tmp_path / "half", dtype=torch.bfloat16)
    tensor = opened(tmp_path / "half").weights().read(HEAD)
    assert tensor.dtype == torch.bfloat16
    assert torch.equal(tensor, half.lm_head.weight)


@pytest.mark.parametrize("change", ["no prefix", "the other name"])
def test_names_of_a_tied_model(change: str, tmp_path: Path) -> None:
    model = saved(tmp_path, "llama_tied")
    if change == "no prefix":
        edit(tmp_path, lambda t: [t.update({n.removeprefix("model."): t.pop(n)}) for n in list(t)])
    else:
        edit(tmp_path, lambda t: t.update({HEAD: t.pop(TABLE)}))
    assert torch.equal(logits(filled(opened(tmp_path))), logits(model))


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    saved(tmp_path)
    edit(tmp_path, lambda t: t.update({"stray.weight": t.pop("model.norm.weight")}))
    said = refused(tmp_path)
    assert "LlamaForCausalLM: missing 1 tensor (model.norm.weight)" in said
    assert "unexpected 1 tensor, 144 B (stray.weight)" in said
    edit(tmp_path, lambda t: [t.pop(name) for name in list(t) if "layers.1" in name])
    edit(tmp_path, lambda t: [t.pop(name) for name in list(t) if "layers.0.mlp" in name])
    assert "missing 13 tensors (" in refused(tmp_path)  # a long list is cut
    assert ", and 3 more)" in refused(tmp_path)


def test_converted_names_are_checked_too(tmp_path: Path) -> None:
    saved(tmp_path, "mixtral")
    edit(tmp_path, lambda t: t.update({"stray": t.pop("model.norm.weight")}))
    assert "missing 1 tensor (model.norm.weight); unexpected" in refused(tmp_path)


def test_stored_rotary_table_is_harmless(tmp_path: Path) -> None:
    model = saved(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(tmp_path, lambda t: t.update({name: torch.zeros(3)}))
    assert torch.equal(logits(filled(opened(tmp_path))), logits(model))


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    configured(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(StageError, match="are quantized and cannot be trained"):
        opened(tmp_path)


def test_fingerprint_follows_the_weights(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    saved(tmp_path / "b")
    first = opened(tmp_path / "a").fingerprint
    assert opened(tmp_path / "b").fingerprint == first
    configured(tmp_path / "b", transformers_version="1.0", dtype="bfloat16")
    assert opened(tmp_path / "b").fingerprint == first
    edit(tmp_path / "b", lambda t: t[HEAD].add_(1))
    assert opened(tmp_path / "b").fingerprint != first


def test_gguf_file(tmp_path: Path) -> None:
    model = filled(random_source(tiny_llama_config(), tmp_path))
    file = tmp_path / "tiny.gguf"
    write_llama(file, model)
    for source in (opened(file), opened(tmp_path, gguf_file="tiny.gguf")):
        read = source.weights()
        for name, tensor in model.state_dict().items():
            assert torch.equal(read.read(name), tensor), name
        torch.testing.assert_close(logits(filled(source)), logits(model), rtol=0, atol=1e-6)
    save_tokenizer(tmp_path / "words")
    opened(file, tokenizer=str(tmp_path / "words")).save_assets(tmp_path, dtype="fp32")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert not {"quantization_config", "_model_name_or_path", "_name_or_path"} & config.keys()


# Frozen parameters.


def trained_names(source: Any) -> set[str]:
    named = outline(source).named_parameters(remove_duplicate=False)
    return {name for name, one in named if one.requires_grad}


def checkpoint(source: Any) -> MemoryWeights:
    """Return changed weights as a checkpoint has them, without those that are frozen."""
    every = changed(source)
    kept = {name: one for name, one in every.tensors.items() if name not in source.frozen_base}
    return MemoryWeights(kept)


def exported(folder: Path, source: Any, **fields: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of an export of a checkpoint with changed weights."""
    stage = ExportSafetensors(folder=str(folder / "out"), **fields)
    stage.run(context(folder), checkpoint(source), source)
    return stored(folder / "out")


def test_a_shared_tensor_is_frozen_by_either_name(tmp_path: Path) -> None:
    saved(tmp_path, "llama_tied")
    for name in (TABLE, HEAD):
        source = opened(tmp_path, frozen=(name,))
        assert source.frozen_base == {TABLE, HEAD}
        assert not {TABLE, HEAD} & trained_names(source)
        source.tie(model := source.build())
        assert not model.lm_head.weight.requires_grad
    assert not opened(tmp_path).frozen_base


def test_other_views_keep_what_is_frozen_apart(tmp_path: Path) -> None:
    saved(tmp_path)
    source = opened(tmp_path, frozen=("model.layers.0.*",))
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
    saved(tmp_path)
    with pytest.raises(StageError, match=told):
        opened(tmp_path, frozen=(pattern,))


OLD = {"experts": ("*.experts.*",), "gpt2": ("transformer.h.0.*", "*wpe*")}


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gpt2", "experts"])
def test_an_export_has_frozen_tensors_as_they_were(kind: str, tmp_path: Path) -> None:
    config = MOE["qwen3_moe"] if kind == "experts" else FAMILIES[kind]
    saved(tmp_path, config, dtype=torch.bfloat16)
    source = opened(tmp_path, frozen=OLD.get(kind, ("*.layers.0.*", "lm_head.*")))
    before, after = tensors_of(tmp_path), exported(tmp_path, source)
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


def test_frozen_tensors_of_a_gguf_file(tmp_path: Path) -> None:
    model = filled(random_source(tiny_llama_config(num_key_value_heads=6), tmp_path))
    write_llama(tmp_path / "model.gguf", model)
    source = opened(tmp_path / "model.gguf", frozen=("model.layers.1.*",))
    assert len(source.frozen_base) == 9
    weights = source.merge_trained(checkpoint(source))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(weights.read(name), source.weights().read(name))


def test_a_frozen_embedding_of_another_size(tmp_path: Path) -> None:
    saved(tmp_path)
    source = opened(tmp_path, frozen=("model.embed_tokens.*",), vocab_size=120)
    found = exported(tmp_path, source, dtype="fp32")
    assert torch.equal(found[TABLE], tensors_of(tmp_path)[TABLE][:120])


def test_an_adapter_on_a_model_with_frozen_parameters(tmp_path: Path) -> None:
    saved(tmp_path)
    source = opened(tmp_path, frozen=("model.layers.0.*",))
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
