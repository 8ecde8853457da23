"""Models from a recipe's config, a folder, a GGUF file, code in a folder, and the hub (without a
network); frozen parameters."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, dynamic_module_utils

from pipeline.errors import StageError, UsageError
from pipeline.utils.foreign import TRUST_CODE
from stages.adapter.lora import Lora
from stages.export.safetensors import ExportSafetensors
from stages.model.declared import outline
from stages.model.hf import HfModel
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

# Configs.


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hiden_size": 3}, "a llama config has no key 'hiden_size' (did you mean hidden_size?)"),
        ({"qqqq": 3}, "a llama config has no key 'qqqq'"),
        ({"hidden_size": "x"}, "the model's config cannot be used: "),
        ({"model_type": "lama"}, "the model's config cannot be used: "),
    ],
)
def test_unusable_config(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StageError) as error:
        random_source(tiny_llama_config(**config), tmp_path)
    assert str(error.value).startswith(message)


def test_a_model_that_cannot_be_built(tmp_path: Path) -> None:
    for config, attention in (({"model_type": "vit"}, "sdpa"), (FAMILIES["llama"], "nonsense")):
        source = HfModel(config=config, attention=attention).run(context(tmp_path))
        with pytest.raises(StageError, match="cannot be built"):
            source.build()


def test_rope_theta_in_its_old_spelling(tmp_path: Path) -> None:
    for fields, theta in (({}, 10000.0), ({"rope_theta": 55.0}, 55.0)):
        model = random_source(tiny_llama_config(**fields), tmp_path).build()
        table = model.get_buffer("model.rotary_emb.inv_freq")
        assert table[1].item() == pytest.approx(theta ** (-2 / 6))


def test_config_from_a_file(tmp_path: Path) -> None:
    saved(tmp_path)
    source = HfModel(config=str(tmp_path / "config.json")).run(context(tmp_path, seed=4))
    twin = random_source(FAMILIES["llama"], tmp_path, seed=4)
    assert torch.equal(logits(filled(source)), logits(filled(twin)))


# Folders.


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


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *(
            (json.dumps({"metadata": {}, "weight_map": {HEAD: name}}), "points outside its folder")
            for name in ("../model.safetensors", "/tmp/model.safetensors", "")
        ),
        ("{", "cannot be read"),
        ("[]", "not a JSON object"),
        ('{"weight_map": 3}', "is damaged"),
        ('{"weight_map": {"a": 1}}', "is missing"),
    ],
)
def test_a_damaged_index(text: str, said: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / INDEX).write_text(text)
    assert said in refused(tmp_path)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size="30KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert "cannot be read as safetensors" in refused(tmp_path)
    shard.unlink()
    assert f"a weight file is missing: {shard}" in refused(tmp_path)
    (tmp_path / INDEX).unlink()
    assert "no weights in" in refused(tmp_path)


def test_other_weights_of_a_folder(tmp_path: Path) -> None:
    model = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    random = opened(tmp_path, init="random")
    assert torch.equal(logits(filled(random)), logits(model))  # same seed, same architecture
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
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


def test_tokenizer_and_assets(tmp_path: Path) -> None:
    saved(tmp_path / "in")
    configured(tmp_path / "in", use_cache=True)
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


def test_a_tokenizer_from_elsewhere_or_none(tmp_path: Path) -> None:
    source = random_source(tiny_llama_config(), tmp_path)
    with pytest.raises(StageError, match=r"comes without a tokenizer.*set `tokenizer`"):
        source.tokenizer()
    source.save_assets(tmp_path, dtype="fp32")
    assert not list(tmp_path.glob("tokenizer*"))
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


# The hub.

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Replaces the hub: a snapshot is a local folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[tuple[str, str | None, list[str]]] = []

    def snapshot_download(
        self, repo: str, *, revision: str | None, allow_patterns: list[str]
    ) -> str:
        self.calls.append((repo, revision, allow_patterns))
        return str(self.folder)

    def model(self, **fields: Any) -> Any:
        stage = HfModel(path="owner/name", revision=COMMIT, **fields)
        return stage.run(context(self.folder))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_hub_model(hub: Hub) -> None:
    model = saved(hub.folder)
    source = hub.model()
    assert torch.equal(logits(filled(source)), logits(model))
    assert source.name == "owner/name"
    assert [call[:2] for call in hub.calls] == [("owner/name", COMMIT)]
    assert "*.safetensors" in hub.calls[0][2]
    assert "*.bin" not in hub.calls[0][2]


def test_an_adapter_next_to_the_weights_of_a_hub_model(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    saved(hub.folder)
    (hub.folder / INDEX).write_text("{}")
    hub.model()
    assert "model.safetensors is read" in caplog.text
    (hub.folder / "adapter_config.json").write_text("{}")
    with pytest.raises(StageError, match=r"owner/name: .*the adapter next to the weights is not"):
        hub.model()
    hub.calls.clear()
    hub.model(init="random")
    assert not {"*.safetensors", "pytorch_model*.bin"} & set(hub.calls[0][2])


def test_hub_model_with_torch_files_only(hub: Hub) -> None:
    filled(random_source(FAMILIES["llama"], hub.folder)).config.save_pretrained(hub.folder)
    hub.model()
    assert "pytorch_model*.bin" in hub.calls[1][2]


def test_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(StageError, match=r"cannot get owner/name .* no route to host"):
        hub.model()


# Code in a folder.

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a Llama under another name, with its class in a file next to it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    saved(tmp_path / "mine", "llama_tied")
    (tmp_path / "mine/code_mine.py").write_text(CODE)
    auto_map = {
        "AutoConfig": "code_mine.MineConfig",
        "AutoModelForCausalLM": "code_mine.MineForCausalLM",
    }
    configured(tmp_path / "mine", model_type="mine", auto_map=auto_map)
    return tmp_path / "mine"


def test_code_is_not_run_unasked(mine: Path, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="contains custom code"):
        opened(mine)
    assert not (tmp_path / "modules").exists() or not list((tmp_path / "modules").glob("*/mine*"))


@pytest.mark.parametrize("fields", [{"trust_remote_code": True}, {"attention": "a/kernel"}])
def test_a_recipe_alone_does_not_allow_code(
    fields: dict[str, Any], mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRUST_CODE, raising=False)
    with pytest.raises(UsageError, match=r"would run \(--trust-remote-code allows it"):
        opened(mine, **fields)
    assert not (tmp_path / "modules").exists()


def test_code_is_exported(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUST_CODE, "1")
    source = opened(mine, trust_remote_code=True)
    weights = changed(source)
    done = ExportSafetensors(dtype="fp32").run(context(tmp_path), weights, source)
    assert "code_mine.py" in done.files
    loaded = AutoModelForCausalLM.from_pretrained(done.folder, trust_remote_code=True)
    assert type(loaded).__name__ == "MineForCausalLM"
    assert torch.equal(logits(loaded.eval()), logits(filled(source, weights)))


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
