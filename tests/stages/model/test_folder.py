"""Pretrained models from a local folder or a GGUF file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.contracts.model import ModelSource
from pipeline.errors import StageError
from stages.model.hf import HfModel
from tests.support.gguf import write_llama
from tests.support.models import (
    FAMILIES,
    context,
    filled,
    logits,
    random_source,
    save_tokenizer,
    tiny_llama_config,
)


def saved(folder: Path, config: dict[str, Any], **options: Any) -> Any:
    """Save a model with random weights through transformers; return the model."""
    model = filled(random_source(config, folder))
    model.save_pretrained(folder, **options)
    return model


def opened(path: Path | str, **fields: Any) -> ModelSource:
    return HfModel(path=str(path), **fields).run(context(Path("run")))


def edit_tensors(folder: Path, edit: Any) -> None:
    """Rewrite model.safetensors after `edit(tensors)` changed the dict."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma2"])
def test_loads_what_transformers_saved(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, FAMILIES[family])
    assert torch.equal(logits(filled(opened(tmp_path))), logits(model))


def test_sharded_folder(tmp_path: Path) -> None:
    model = saved(tmp_path, FAMILIES["llama"], max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert torch.equal(logits(filled(opened(tmp_path))), logits(model))


def test_source_dtype_is_kept(tmp_path: Path) -> None:
    model = filled(random_source(FAMILIES["llama"], tmp_path)).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    reader = opened(tmp_path).weights()
    tensor = reader.read("lm_head.weight")
    assert tensor.dtype == torch.bfloat16
    assert torch.equal(tensor, model.lm_head.weight)
    reader.close()


def test_base_model_without_prefix(tmp_path: Path) -> None:
    model = saved(tmp_path, FAMILIES["llama_tied"])

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit_tensors(tmp_path, strip)
    assert torch.equal(logits(filled(opened(tmp_path))), logits(model))


def test_tied_tensor_stored_under_the_other_name(tmp_path: Path) -> None:
    model = saved(tmp_path, FAMILIES["llama_tied"])
    edit_tensors(
        tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")})
    )
    assert torch.equal(logits(filled(opened(tmp_path))), logits(model))


def test_tied_names_with_different_values_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["llama_tied"])
    edit_tensors(
        tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    )
    with pytest.raises(StageError, match="shares one tensor between lm_head"):
        opened(tmp_path).weights()


def test_missing_and_unexpected_names_are_listed(tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["llama"])
    edit_tensors(tmp_path, lambda t: t.update({"stray.weight": t.pop("model.norm.weight")}))
    with pytest.raises(StageError) as error:
        opened(tmp_path).weights()
    assert "LlamaForCausalLM: missing 1 tensor (model.norm.weight)" in str(error.value)
    assert "unexpected 1 tensor, 144 B (stray.weight)" in str(error.value)


def test_long_lists_are_cut(tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["llama"])
    edit_tensors(tmp_path, lambda t: [t.pop(name) for name in list(t) if "layers.1" in name])
    edit_tensors(tmp_path, lambda t: [t.pop(name) for name in list(t) if "layers.0.mlp" in name])
    with pytest.raises(StageError, match=r"missing 12 tensors \(.*, and 2 more\)"):
        opened(tmp_path).weights()


def test_stored_rotary_table_is_harmless(tmp_path: Path) -> None:
    model = saved(tmp_path, FAMILIES["llama"])
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(tmp_path, lambda t: t.update({name: torch.zeros(3)}))
    assert torch.equal(logits(filled(opened(tmp_path))), logits(model))


def test_wrong_shape(tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["llama"])
    edit_tensors(tmp_path, lambda t: t.update({"model.norm.weight": torch.zeros(35)}))
    with pytest.raises(StageError, match=r"another shape 1 tensor \(model.norm.weight 35 instead"):
        opened(tmp_path).weights()


def test_converted_checkpoint_names_are_checked_too(tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["mixtral"])
    edit_tensors(tmp_path, lambda t: t.update({"stray": t.pop("model.norm.weight")}))
    with pytest.raises(StageError, match=r"missing 1 tensor \(model.norm.weight\); unexpected"):
        opened(tmp_path).weights()


@pytest.mark.parametrize("name", ["../model.safetensors", "/tmp/model.safetensors", ""])
def test_index_must_stay_inside(name: str, tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["llama"])
    (tmp_path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StageError, match="points outside its folder"):
        opened(tmp_path).weights()


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_damaged_index(text: str, tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["llama"])
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(StageError, match=r"is damaged|cannot be read|not a JSON object|is missing"):
        opened(tmp_path).weights()


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["llama"], max_shard_size="30KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(StageError, match="cannot be read as safetensors"):
        opened(tmp_path).weights()
    shard.unlink()
    with pytest.raises(StageError, match=f"a weight file is missing: .*{shard.name}"):
        opened(tmp_path).weights()
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(StageError, match="no weights in"):
        opened(tmp_path).weights()


def test_torch_file(tmp_path: Path) -> None:
    model = saved(tmp_path, FAMILIES["llama"])
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert torch.equal(logits(filled(opened(tmp_path))), logits(model))


def test_random_weights_on_a_folder_s_architecture(tmp_path: Path) -> None:
    model = saved(tmp_path, FAMILIES["llama"])
    (tmp_path / "model.safetensors").unlink()
    random = opened(tmp_path, init="random")
    assert torch.equal(logits(filled(random)), logits(model))  # same seed, same architecture


def test_config_from_a_file(tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["llama"])
    source = HfModel(config=str(tmp_path / "config.json")).run(context(tmp_path, seed=4))
    twin = random_source(FAMILIES["llama"], tmp_path, seed=4)
    assert torch.equal(logits(filled(source)), logits(filled(twin)))


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["llama"])
    edit_config(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(StageError, match="are quantized and cannot be trained"):
        opened(tmp_path)


def test_attention_that_the_model_lacks(tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["llama"])
    with pytest.raises(StageError, match="cannot be built"):
        opened(tmp_path, attention="nonsense").build()


def test_fingerprint_follows_the_weights(tmp_path: Path) -> None:
    saved(tmp_path / "a", FAMILIES["llama"])
    saved(tmp_path / "b", FAMILIES["llama"])
    first = opened(tmp_path / "a").fingerprint
    assert opened(tmp_path / "b").fingerprint == first
    edit_config(tmp_path / "b", transformers_version="1.0", dtype="bfloat16")
    assert opened(tmp_path / "b").fingerprint == first
    edit_tensors(tmp_path / "b", lambda t: t["lm_head.weight"].add_(1))
    assert opened(tmp_path / "b").fingerprint != first


def test_tokenizer_and_assets(tmp_path: Path) -> None:
    saved(tmp_path / "in", FAMILIES["llama"])
    edit_config(tmp_path / "in", use_cache=True)
    save_tokenizer(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()
    source = opened(tmp_path / "in")
    assert source.tokenizer()("a b")["input_ids"] == [3, 4]
    source.save_assets(out, dtype="bf16")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["use_cache"] is True
    assert (out / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert (out / "generation_config.json").is_file()
    assert (out / "tokenizer.json").is_file()
    for file in out.iterdir():
        assert str(tmp_path) not in file.read_text()


def test_no_tokenizer(tmp_path: Path) -> None:
    source = random_source(tiny_llama_config(), tmp_path)
    with pytest.raises(StageError, match=r"comes without a tokenizer.*set `tokenizer`"):
        source.tokenizer()
    source.save_assets(tmp_path, dtype="fp32")
    assert not list(tmp_path.glob("tokenizer*"))


def test_tokenizer_from_elsewhere(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    stage = HfModel(config=tiny_llama_config(), tokenizer=str(tmp_path))
    assert stage.run(context(tmp_path)).tokenizer()("b a")["input_ids"] == [4, 3]


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


def test_gguf_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").touch()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(StageError, match=r"pip install 'pipetrain\[gguf\]'"):
        opened(tmp_path / "x.gguf")
