"""Mistakes in a `model.hf` slot that are found before a start."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.errors import Problem
from pipeline.testing import plan_view, problems
from pipeline.utils.foreign import TRUST_CODE
from stages.adapter.lora import Lora
from stages.model import checks
from stages.model.files import weight_files
from stages.model.hf import HfModel
from tests.support.model_folders import found, opened, saved
from tests.support.models import save_tokenizer, tiny_llama_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LLAMA = {"model_type": "llama"}


@pytest.mark.parametrize("place", ["top", "part"])
def test_a_kernel_that_a_config_names(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRUST_CODE, raising=False)
    named = {"_attn_implementation": "any/kernel"}
    config = LLAMA | (named if place == "top" else {"text_config": named})
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = "code of the hub's kernel any/kernel would run (--trust-remote-code"
    for fields in ({"config": str(tmp_path / "config.json")}, {"path": str(tmp_path)}):
        assert any(said in each for each in found(**fields))


def test_with_pins_a_kernel_names_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    of_config = LLAMA | {"_attn_implementation": "any/kernel"}
    asked: list[dict[str, Any]] = [{"attention": "any/kernel@v1:fast"}, {"config": of_config}]
    said = "the hub's kernel any/kernel names no commit (write any/kernel@COMMIT)"
    for pinned in (False, True):
        monkeypatch.setenv("PIPE_PINNED", str(int(pinned)))
        for fields in asked:
            assert any(said in each for each in found(**fields)) == pinned
        at_commit = found(attention=f"any/kernel@{COMMIT}:fast")
        assert not any("names no commit" in each for each in at_commit)
        fetched = "flash_attention_2 without the package flash_attn is the hub's, at no commit"
        assert any(fetched in each for each in found(attention="flash_attention_2")) == pinned


HUB = {"path": "a/b", "revision": COMMIT}
TINY = tiny_llama_config()
ONE: list[tuple[dict[str, Any], str]] = [
    ({}, "path: the model is not given"),
    (
        HUB | {"config": LLAMA},
        "path: `path` and `config` exclude each other (set one of them to null, "
        "such as config: null)",
    ),
    ({"config": {"hidden_size": 3}}, "config: `model_type` is missing"),
    ({"config": "./nowhere.json"}, "config: no such file: nowhere.json"),
    ({"config": LLAMA, "gguf_file": "x.gguf"}, "gguf_file: `gguf_file` needs `path`"),
    ({"config": LLAMA, "revision": COMMIT}, "revision: `revision` needs `path`"),
    ({"path": "./nowhere"}, "path: no such folder: nowhere"),
    ({"path": "./nowhere.gguf"}, "path: no such file: nowhere.gguf"),
    ({"path": "~nobody-here/x"}, "path: no such folder: ~nobody-here/x"),
    ({"config": "~nobody-here/x"}, "config: no such file: ~nobody-here/x"),
    (
        {"path": "owner/name@v1"},
        "path: 'owner/name@v1' is neither a hub id (owner/name) nor a local path "
        "(write `path: owner/name` and `revision: v1`)",
    ),
    ({"path": "a/b", "revision": "a b"}, "revision: 'a b' is not a commit, branch or tag"),
    ({"path": "a/b/c", "revision": COMMIT}, "path: 'a/b/c' is neither a hub id"),
    (HUB | {"gguf_file": "../x.gguf"}, "gguf_file: must be a file name inside `path`"),
    (
        {"path": "a/b", "tokenizer_revision": COMMIT},
        "tokenizer_revision: needs `tokenizer`; the tokenizer in `path` has its `revision`",
    ),
    (HUB | {"tokenizer": "./nowhere"}, "tokenizer: no tokenizer files in nowhere"),
    (HUB | {"tokenizer": "~nobody-here/x"}, "tokenizer: no tokenizer files in ~nobody-here/x"),
    (
        {"config": TINY, "new_weights": ["a"]},
        "new_weights: `new_weights` needs weights that are loaded",
    ),
    ({"config": TINY, "unused_weights": {"a": "drop"}}, "unused_weights: `unused_weights` needs w"),
    ({"config": TINY, "vocab_size": 3}, "vocab_size: `config` sets it already"),
]


@pytest.mark.parametrize(("fields", "expected"), ONE)
def test_one_mistake(fields: dict[str, Any], expected: str) -> None:
    (problem,) = found(**fields)
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"path": "owner/name", "revision": COMMIT},
        {"path": "gpt2"},
        {"path": "owner/name", "revision": "main"},
        {"path": "a/b", "tokenizer": "c/d", "tokenizer_revision": "v1"},
        {"config": TINY},
    ],
)
def test_no_mistake(fields: dict[str, Any]) -> None:
    assert found(**fields) == []


def test_several_mistakes_at_once(tmp_path: Path) -> None:
    def keys(**fields: Any) -> list[str]:
        return [problem.partition(":")[0] for problem in found(**fields)]

    fields: dict[str, Any] = {"new_weights": ["a"], "unused_weights": {"b": "drop"}}
    assert keys(path=str(tmp_path / "x"), revision=COMMIT, tokenizer="./nowhere") == [
        "revision", "path", "tokenizer"
    ]  # fmt: skip
    assert keys(config=TINY, vocab_size=3, **fields) == [*fields, "vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert keys(path=str(tmp_path), vocab_size=3, **fields) == []
    assert found(path=str(tmp_path), vocab_size=3, init="random", **fields) == [
        f"{key}: `{key}` needs weights that are loaded" for key in fields
    ]


@pytest.mark.parametrize(("kind", "near"), [("mistrral", "mistral"), ("llamma", "llama")])
def test_an_architecture_that_is_no_causal_language_model(
    kind: str, near: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "auto_map": {}}))
    said = f"transformers has no causal language model of type '{kind}' (did you mean `{near}`?"
    (spelled,) = found(config={"model_type": kind})
    (read,) = found(path=str(tmp_path))
    assert spelled.startswith(f"config: {said}")
    assert read.startswith(f"path: {said}")
    monkeypatch.setenv(TRUST_CODE, "1")
    assert found(path=str(tmp_path), trust_remote_code=True) == []


def test_folder(tmp_path: Path) -> None:
    path, config = str(tmp_path), tmp_path / "config.json"
    none = f"path: no config.json in {tmp_path} "
    assert found(path=path) == [f"{none}(expected Hugging Face layout)"]
    (tmp_path / "m.gguf").touch()
    assert found(path=path) == [f"{none}(set `gguf_file: m.gguf`)"]
    assert found(path=path, gguf_file="m.gguf") == []
    assert found(path=str(tmp_path / "m.gguf")) == []
    missing = f"gguf_file: no such file: {tmp_path / 'n.gguf'}"
    assert found(path=path, gguf_file="n.gguf") == [missing]
    config.write_text("{")
    (problem,) = found(path=path)
    assert problem.startswith(f"path: {config} cannot be read: ")
    config.write_text("[]")
    assert found(path=path) == [f"path: {config} is not a JSON object"]
    config.write_text(json.dumps(TINY))
    save_tokenizer(tmp_path)
    assert found(path=path, tokenizer=path) == []
    config.write_text(json.dumps({"quantization_config": {}}))
    assert "are quantized" in found(path=path)[0]


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


PADDING = "the loss of a row of a prophetnet depends on its padding"
LATER = "sees those after it, which it would be trained to predict"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "roberta"}, [f"each token of a roberta {LATER}"]),
        ({"model_type": "xlm", "is_decoder": True}, [f"each token of a xlm {LATER}"]),
        ({"model_type": "xlnet"}, [f"each token of a xlnet {LATER}"]),
        ({"model_type": "prophetnet"}, [PADDING]),
        ({"model_type": "roberta", "is_decoder": True}, []),
        ({"model_type": "xlm", "causal": True}, []),
    ],
)
def test_rows_that_see_what_they_should_not(config: dict[str, Any], said: list[str]) -> None:
    problems = found(config=config, attention="eager")
    assert [one.removeprefix("config: ").split(" (")[0] for one in problems] == said


def test_angles_of_the_longest_row() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    own = tiny_llama_config(rope_parameters=dynamic)
    code = HfModel(config={**own, "auto_map": {}}, trust_remote_code=True)
    batch = HfModel(config={"model_type": "deepseek_v4", "rope_parameters": dynamic})
    for stage in (code, batch):
        messages = [one.message for one in checks.problems(stage)]
        assert any("depend on the longest row of a batch" in one for one in messages)
    assert not list(checks.problems(HfModel(config=own)))


def test_an_attention_that_the_architecture_lacks() -> None:
    (problem,) = found(config={"model_type": "gemma2"})
    assert problem == "attention: transformers has no sdpa for a gemma2 (set attention: eager)"
    assert found(config={"model_type": "gemma2"}, attention="eager") == []


SLOW: list[tuple[dict[str, Any], str, str]] = [
    ({"attention": "flash_attention_2"}, "attention", "needs a GPU"),
    ({"attention": "kernels-community/flash-attn2"}, "attention", "needs a GPU"),
    ({"attention": "flex_attention"}, "attention", "computes no gradients on a CPU"),
    ({"kernels": "liger"}, "kernels", "Liger needs a GPU"),
    ({"fp8": {}, "compile": {}}, "fp8", "needs a GPU with 8-bit products"),
    (
        {"activation_checkpointing": {"offload": True}, "compile": {}},
        "compile",
        "torch compiles no block whose activations are offloaded",
    ),
    (
        {"activation_checkpointing": {"keep": "attention"}, "attention": "eager"},
        "activation_checkpointing.keep",
        "eager attention is not one operation",
    ),
]


@pytest.mark.parametrize(("fields", "key", "words"), SLOW)
def test_what_cannot_work_here_is_refused(fields: dict[str, Any], key: str, words: str) -> None:
    problem = problems(HfModel, {"config": LLAMA, **fields}, plan=plan_view())[-1]
    assert (problem.key, words in problem.message) == (key, True)


def test_on_a_gpu_it_depends_on_what_is_installed() -> None:
    def messages(fields: dict[str, Any]) -> list[str]:
        given, plan = {"config": LLAMA, **fields}, plan_view(device="cuda")
        return [one.message for one in problems(HfModel, given, plan=plan)]

    assert messages({"attention": "flex_attention", "fp8": {}, "compile": {}}) == []
    assert messages({"activation_checkpointing": {"keep": "attention"}}) == []
    assert messages({"kernels": "liger"}) == ["Liger needs liger-kernel"]


def test_a_chat_template(tmp_path: Path) -> None:
    def problem(given: str) -> str:
        stage = dataclasses.replace(HfModel(config=LLAMA), chat_template=given)
        said = [each for each in stage.check(plan_view()) if each.key == "chat_template"]
        return str(said[0]) if said else ""

    good, bad = tmp_path / "good.jinja", tmp_path / "bad.jinja"
    good.write_text("{% for m in messages %}{% generation %}{% endgeneration %}{% endfor %}")
    bad.write_text("{% for m in messages %}\n{{ m. }}")
    assert problem("chatml") == problem(str(good)) == ""
    assert "no chat template is called 'chatm'" in problem("chatm")
    assert "did you mean chatml" in problem("chatm").replace("`", "").replace("'", "")
    assert "known here: chatml, gemma, llama3, plain" in problem("zephyr")
    assert f"{bad}:2: no chat template: " in problem(str(bad))
    assert "is not a file" in problem(str(tmp_path))
    assert "is not a file" in problem(str(tmp_path / "absent.jinja"))


def _folder(folder: Path) -> Path:
    """Write a model's folder as far as a check looks at it."""
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def _beside(folder: Path, *, init: Any = "pretrained", **slots: Any) -> list[Problem]:
    stage = HfModel(path=str(folder), init=init)
    return list(checks.not_read_problems(stage, plan_view({"model": stage, **slots})))


def test_an_adapter_next_to_the_weights(tmp_path: Path) -> None:
    _folder(tmp_path)
    assert _beside(tmp_path) == []
    (tmp_path / "adapter_config.json").write_text("{}")
    [problem] = _beside(tmp_path)
    assert (problem.key, problem.warning) == ("path", False)
    assert "is not applied" in problem.message
    assert f"start_from: {tmp_path}" in problem.hint
    assert _beside(tmp_path, adapter=Lora(start_from=f"{tmp_path}/")) == []
    assert len(_beside(tmp_path, adapter=Lora(start_from=str(tmp_path.parent)))) == 1
    assert _beside(tmp_path, init="random") == []


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
    problems = _beside(tmp_path)
    said = [each.message for each in problems]
    assert said == ([f"{tmp_path} has {told} is read"] if told else [])
    assert all(each.warning for each in problems)
    read = weight_files(tmp_path, None)[0].name.removesuffix(".1")
    assert told is None or told.removesuffix(".index.json").endswith(f": {read}")


def test_transformers_reads_the_single_file_too(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size="50KB")
    assert (tmp_path / SHARDS).is_file()
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
    save_model(other, str(tmp_path / SINGLE), {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(theirs[name], other.state_dict()[name])
    assert torch.equal(opened(tmp_path).weights().read(name), theirs[name])
