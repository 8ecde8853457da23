"""Mistakes in a `model.hf` slot that are found before a start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_model
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.errors import Problem
from pipeline.testing import plan_view
from pipeline.utils.trust import TRUST_CODE
from stages.adapter.lora import Lora
from stages.model.checks import beside_problems
from stages.model.compat import causal_types, image_text_types
from stages.model.files import weight_files
from stages.model.hf import HfModel
from stages.model.source_text_compat import attentions, suited_attention
from tests.support.models import context, save_tokenizer, tiny_llama_config
from tests.support.tier import spread

PLAN = plan_view({})
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def found(**fields: Any) -> list[str]:
    """Return the problems as `key: message (hint)`."""
    return [str(problem) for problem in HfModel(**fields).check(PLAN)]


@pytest.mark.parametrize("place", ["top", "part"])
def test_a_kernel_that_a_config_names(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRUST_CODE, raising=False)
    named = {"_attn_implementation": "any/kernel"}
    config = {"model_type": "llama"} | (named if place == "top" else {"text_config": named})
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = "code of the hub's kernel any/kernel would run (--trust-remote-code"
    for fields in ({"config": str(tmp_path / "config.json")}, {"path": str(tmp_path)}):
        assert any(said in each for each in found(**fields))  # type: ignore[arg-type]


def test_with_pins_a_kernel_names_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    of_config = {"model_type": "llama", "_attn_implementation": "any/kernel"}
    asked = {"attention": "any/kernel@v1:fast"}, {"config": of_config}
    said = "the hub's kernel any/kernel names no commit (write any/kernel@COMMIT)"
    for pinned in (False, True):
        monkeypatch.setenv("PIPE_PINNED", str(int(pinned)))
        for fields in asked:
            assert any(said in each for each in found(**fields)) == pinned  # type: ignore[arg-type]
        at_commit = found(attention=f"any/kernel@{COMMIT}:fast")
        assert not any("names no commit" in each for each in at_commit)
        fetched = "flash_attention_2 without the package flash_attn is the hub's, at no commit"
        assert any(fetched in each for each in found(attention="flash_attention_2")) == pinned


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "path: the model is not given"),
        (
            {"path": "a/b", "revision": COMMIT, "config": {"model_type": "llama"}},
            "path: `path` and `config` exclude each other (set one of them to null, "
            "such as config: null)",
        ),
        ({"config": {"hidden_size": 3}}, "config: `model_type` is missing"),
        ({"config": "./nowhere.json"}, "config: no such file: nowhere.json"),
        (
            {"config": {"model_type": "llama"}, "gguf_file": "x.gguf"},
            "gguf_file: `gguf_file` needs `path`",
        ),
        (
            {"config": {"model_type": "llama"}, "revision": COMMIT},
            "revision: `revision` needs `path`",
        ),
        ({"path": "./nowhere"}, "path: no such folder: nowhere"),
        ({"path": "./nowhere.gguf"}, "path: no such file: nowhere.gguf"),
        (
            {"path": "owner/name@v1"},
            "path: 'owner/name@v1' is neither a hub id (owner/name) nor a local path "
            "(write `path: owner/name` and `revision: v1`)",
        ),
        ({"path": "a/b", "revision": "a b"}, "revision: 'a b' is not a commit, branch or tag"),
        ({"path": "a/b/c", "revision": COMMIT}, "path: 'a/b/c' is neither a hub id"),
        (
            {"path": "a/b", "revision": COMMIT, "gguf_file": "../x.gguf"},
            "gguf_file: must be a file name inside `path`",
        ),
        (
            {"path": "a/b", "tokenizer_revision": COMMIT},
            "tokenizer_revision: needs `tokenizer`; the tokenizer in `path` has its `revision`",
        ),
        (
            {"path": "a/b", "revision": COMMIT, "tokenizer": "./nowhere"},
            "tokenizer: no tokenizer files in nowhere",
        ),
    ],
)
def test_one_mistake(fields: dict[str, Any], expected: str) -> None:
    problems = found(**fields)
    assert len(problems) == 1
    assert problems[0].startswith(expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"path": "owner/name", "revision": COMMIT},
        {"path": "gpt2"},
        {"path": "owner/name", "revision": "main"},
        {"path": "a/b", "tokenizer": "c/d", "tokenizer_revision": "v1"},
        {"config": tiny_llama_config()},
    ],
)
def test_no_mistake(fields: dict[str, Any]) -> None:
    assert found(**fields) == []


def test_the_table_of_architectures_is_transformers_own() -> None:
    from transformers.models.auto import modeling_auto as tables

    assert causal_types() == tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert image_text_types() == tables.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        ({"model_type": "mistrral"}, "did you mean `mistral`?"),
        ({"model_type": "llamma"}, "did you mean `llama`?"),
    ],
)
def test_an_architecture_that_is_no_causal_language_model(
    config: dict[str, Any], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": {}}))
    said = f"transformers has no causal language model of type '{config['model_type']}' ({hint}"
    (spelled,) = found(config=config)
    (read,) = found(path=str(tmp_path))
    assert spelled.startswith(f"config: {said}")
    assert read.startswith(f"path: {said}")
    monkeypatch.setenv(TRUST_CODE, "1")
    assert found(path=str(tmp_path), trust_remote_code=True) == []


def test_folder(tmp_path: Path) -> None:
    assert found(path=str(tmp_path)) == [
        f"path: no config.json in {tmp_path} (expected Hugging Face layout)"
    ]
    (tmp_path / "m.gguf").touch()
    assert found(path=str(tmp_path)) == [
        f"path: no config.json in {tmp_path} (set `gguf_file: m.gguf`)"
    ]
    assert found(path=str(tmp_path), gguf_file="m.gguf") == []
    assert found(path=str(tmp_path / "m.gguf")) == []
    assert found(path=str(tmp_path), gguf_file="n.gguf") == [
        f"gguf_file: no such file: {tmp_path / 'n.gguf'}"
    ]
    (tmp_path / "config.json").write_text("{")
    (problem,) = found(path=str(tmp_path))
    assert problem.startswith(f"path: {tmp_path / 'config.json'} cannot be read: ")
    (tmp_path / "config.json").write_text("[]")
    assert found(path=str(tmp_path)) == [f"path: {tmp_path / 'config.json'} is not a JSON object"]
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama_config()))
    save_tokenizer(tmp_path)
    assert found(path=str(tmp_path), tokenizer=str(tmp_path)) == []
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {}}))
    assert "are quantized" in found(path=str(tmp_path))[0]


def test_several_mistakes_at_once(tmp_path: Path) -> None:
    problems = found(path=str(tmp_path / "x"), revision=COMMIT, tokenizer="./nowhere")
    assert [problem.partition(":")[0] for problem in problems] == ["revision", "path", "tokenizer"]


def test_checking_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from stages.model.hf import HfModel\n"
        "from stages.export.safetensors import ExportSafetensors\n"
        "list(HfModel(path='./x').check(None))\n"
        "from pipeline.testing import plan_view\n"
        "list(ExportSafetensors(folder='./x').check(plan_view()))\n"
        "print(sorted({'torch', 'transformers', 'safetensors', 'numpy'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


LATER = "sees those after it, which it would be trained to predict"
PADDING = "the loss of a row of a prophetnet depends on its padding"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "roberta"}, [f"each token of a roberta {LATER}"]),
        ({"model_type": "xlm", "is_decoder": True}, [f"each token of a xlm {LATER}"]),
        ({"model_type": "xlnet"}, [f"each token of a xlnet {LATER}"]),
        (
            {"model_type": "prophetnet"},
            ["the loss of a row of a prophetnet depends on its padding"],
        ),
        ({"model_type": "roberta", "is_decoder": True}, []),
        ({"model_type": "xlm", "causal": True}, []),
    ],
)
def test_rows_that_see_what_they_should_not(config: dict[str, Any], said: list[str]) -> None:
    problems = found(config=config, attention="eager")
    assert [one.removeprefix("config: ").split(" (")[0] for one in problems] == said


def test_an_attention_that_the_architecture_lacks() -> None:
    (problem,) = found(config={"model_type": "gemma2"})
    assert problem == "attention: transformers has no sdpa for a gemma2 (set attention: eager)"
    assert found(config={"model_type": "gemma2"}, attention="eager") == []
    assert suited_attention("gemma2", "cuda") == "flex_attention"
    assert suited_attention("bloom", "cuda") == "eager"
    assert suited_attention("llama", "cpu") == suited_attention("nobody", "cpu") == "sdpa"


@pytest.mark.parametrize("kind", spread(sorted(causal_types()), 24))
def test_attentions_are_those_of_the_class(kind: str) -> None:
    known = attentions(kind)
    built = getattr(transformers, causal_types()[kind], None)
    if known and built is not None:
        assert ("sdpa" in known) is bool(built._supports_sdpa)
        if "sdpa" not in known:
            assert ("flex_attention" in known) is bool(built._supports_flex_attn)


def _folder(folder: Path) -> Path:
    """Write a model's folder as far as a check looks at it."""
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def _beside(folder: Path, **slots: Any) -> list[Problem]:
    stage = HfModel(path=str(folder))
    view = plan_view({"model": stage, **slots})
    return list(beside_problems(stage, view))


def test_an_adapter_beside_the_weights(tmp_path: Path) -> None:
    _folder(tmp_path)
    assert _beside(tmp_path) == []
    (tmp_path / "adapter_config.json").write_text("{}")
    [problem] = _beside(tmp_path)
    assert (problem.key, problem.warning) == ("path", False)
    assert "is not applied" in problem.message
    assert f"start_from: {tmp_path}" in problem.hint
    assert _beside(tmp_path, adapter=Lora(start_from=f"{tmp_path}/")) == []
    assert len(_beside(tmp_path, adapter=Lora(start_from=str(tmp_path.parent)))) == 1
    assert list(beside_problems(HfModel(path=str(tmp_path), init="random"), PLAN)) == []


SINGLE, SHARDS = "model.safetensors", "model.safetensors.index.json"
OTHER, OTHER_SHARDS = "pytorch_model.bin", "pytorch_model.bin.index.json"


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ([SINGLE], None),
        ([SINGLE, OTHER], None),  # of which all libraries read the first
        ([SHARDS, OTHER_SHARDS], None),
        ([SINGLE, SHARDS], f"{SINGLE} and {SHARDS}: {SINGLE}"),
        ([OTHER, OTHER_SHARDS], f"{OTHER} and {OTHER_SHARDS}: {OTHER}"),
        ([SINGLE, OTHER, OTHER_SHARDS], f"{SINGLE}, {OTHER} and {OTHER_SHARDS}: {SINGLE}"),
        ([SHARDS, OTHER, OTHER_SHARDS], f"{SHARDS}, {OTHER} and {OTHER_SHARDS}: {SHARDS}"),
    ],
)
def test_weights_in_several_forms(tmp_path: Path, there: list[str], told: str | None) -> None:
    _folder(tmp_path)
    (tmp_path / SINGLE).unlink()
    for name in there:
        shard = f"{name.removesuffix('.index.json')}.1"
        (tmp_path / name).write_text(json.dumps({"weight_map": {"a": shard}}))
        (tmp_path / shard).touch()
    found = _beside(tmp_path)
    assert [each.message for each in found] == ([f"{tmp_path} has {told} is read"] if told else [])
    assert all(each.warning for each in found)
    read = weight_files(tmp_path, None)[0].name.removesuffix(".1")
    assert told is None or told.removesuffix(".index.json").endswith(f": {read}")


def test_transformers_reads_the_single_file_too(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**tiny_llama_config())
    models = [AutoModelForCausalLM.from_config(config) for _ in range(2)]
    models[0].save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    save_model(models[1], str(tmp_path / "model.safetensors"), {"format": "pt"})
    found = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert torch.equal(found["model.norm.weight"], models[1].state_dict()["model.norm.weight"])
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found[name], models[1].state_dict()[name])
    source = HfModel(path=str(tmp_path)).run(context(tmp_path))
    assert torch.equal(source.weights().read(name), found[name])
