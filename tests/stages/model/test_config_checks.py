"""What configs and tokenizer files say before a start: positions, sizes, tokenizers, kinds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import Problem, StageError
from pipeline.testing import plan_view
from pipeline.testing.conformance import checked
from stages.data.stages import ChatData, StreamData, TextData
from stages.model.assets import open_config
from stages.model.checks import problems
from stages.model.config_checks import lengthwise_kind, too_long, wrong_size
from stages.model.hf import HfModel
from tests.support.command import pipe
from tests.support.models import save_tokenizer, tiny_llama_config
from tests.support.runs import TINY

GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 50}
LLAMA = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}
FEW = {"max_position_embeddings": 511}
YARN = {"factor": 2.0, "rope_type": "yarn"}


def lengths(config: dict[str, Any], length: int) -> list[Problem]:
    """Return the problems of a data slot's samples of `length` tokens."""
    model = HfModel(config=config)
    data = TextData(files="./text.txt", sequence_length=length)
    return list(too_long(model, plan_view({"model": model, "data": data})))


@pytest.mark.parametrize(
    ("config", "positions", "warning"),
    [
        ({**GPT2, "n_positions": 256}, 256, False),
        ({**GPT2, "n_positions": 512}, None, False),
        (GPT2, None, False),  # 1024
        ({"model_type": "opt", "max_position_embeddings": 256}, 256, False),
        (LLAMA, None, True),
        ({**LLAMA, "max_position_embeddings": 512}, None, True),
        ({**LLAMA, **FEW}, 511, True),
        ({**LLAMA, "max_position_embeddings": 256, "rope_scaling": YARN}, None, True),
    ],
)
def test_too_few_positions_are_a_mistake_in_a_table_and_else_a_warning(
    config: dict[str, Any], positions: int | None, warning: bool
) -> None:
    assert lengths(config, 512) == [
        Problem(
            message=f"samples of slot `data` may have 512 tokens, and the model has {positions} "
            "positions",
            hint=f"set data.sequence_length to {positions} or less",
            warning=warning,
        )
    ] * (positions is not None)


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (LLAMA, 2048),
        ({**LLAMA, "model_type": "gemma2"}, 8192),
        ({**LLAMA, "model_type": "qwen3"}, 32768),
        ({"model_type": "mamba", "hidden_size": 8}, None),
    ],
)
def test_positions_that_the_config_leaves_to_its_type(
    config: dict[str, Any], positions: int | None
) -> None:
    told = f"may have 1000000000 tokens, and the model has {positions} positions"
    assert [told in one.message for one in lengths(config, 10**9)] == [True] * bool(positions)
    assert not positions or lengths(config, positions) == []


def test_a_check_ends_with_a_mistake_and_goes_on_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text")
    (tmp_path / "tokenizer.json").touch()
    data = {"use": "data.text", "files": "./text.txt", "sequence_length": 512}
    for config, ok in (({**GPT2, "n_positions": 256}, False), ({**LLAMA, **FEW}, True)):
        model = {"use": "model.hf", "config": config, "tokenizer": str(tmp_path)}
        recipe = {"name": "r", "stages": {"model": {**model, "attention": "eager"}, "data": data}}
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        result = pipe("check", tmp_path / "recipe.yaml")
        told = f"samples of slot `data` may have 512 tokens, and the model has {256 + 255 * ok} "
        assert (result.exit_code, told in result.output) == (0 if ok else 2, True)
    result = pipe("check", tmp_path / "recipe.yaml", "--json")
    record = json.loads(result.stdout)
    assert (record["ok"], len(record["warnings"])) == (True, 1)


MOST = 2**31 - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": -64}, f"hidden_size is -64, expected a whole number from 1 to {MOST}"),
        ({"vocab_size": 10**30}, f"vocab_size is 1e+30, expected a whole number from 1 to {MOST}"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1e+09, expected .* from 0 to 1024"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1, expected .* from 0 to 1024"),
        ({"num_attention_heads": 0}, f"num_attention_heads is 0, expected .* from 1 to {MOST}"),
        ({"num_key_value_heads": -1}, f"num_key_value_heads is -1, expected .* from 1 to {MOST}"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1e.12, expected"),
    ],
)
def test_a_size_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StageError, match=message.replace("+", ".")):
        open_config(HfModel(config=TINY | change), None)
    found = [problem.message for problem in problems(HfModel(config=TINY | change))]
    assert found == [wrong_size(TINY | change)]


def test_sizes_of_parts_and_sizes_that_can_be() -> None:
    assert wrong_size({"text_config": {"num_experts": -1}}).startswith("text_config.num_experts is")
    assert wrong_size({**TINY, "num_experts": 0, "pad_token_id": -1, "n_inner": None}) == ""


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"rope_scaling": {"type": "su"}}, "su"),
        ({"text_config": {"rope_parameters": {"rope_type": "dynamic"}}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "longrope"),
        ({"rope_parameters": {"rope_type": "yarn"}, "quantization": {"type": "dynamic"}}, None),
    ],
)
def test_the_kind_of_rotary_tables_that_a_config_states(
    config: dict[str, Any], kind: str | None
) -> None:
    assert lengthwise_kind(config) == kind


# What a data slot learns of the model's tokenizer.

NONE = (
    "needs a tokenizer, and the model comes without one (set `tokenizer` in the model's slot to a "
    "folder that has one)"
)
CHAT = {"messages": [{"role": "user", "content": "a"}]}


def told(model: Any, stage: Any) -> list[str]:
    plan = plan_view({"model": model})
    assert checked(stage, dataclasses.replace(plan, forecast=True)) == []
    return [str(problem) for problem in checked(stage, plan)]


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[object], str]:
    def make(row: object) -> str:
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        return str(tmp_path / "rows.jsonl")

    return make


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Return a model's folder with a tokenizer without a chat template."""
    (tmp_path / "m").mkdir()
    save_tokenizer(tmp_path / "m")
    (tmp_path / "m/config.json").write_text(json.dumps(tiny_llama_config()))
    (tmp_path / "m/chat_template.jinja").unlink()
    return tmp_path / "m"


@pytest.mark.parametrize("kind", [TextData, ChatData, StreamData])
def test_a_model_without_a_tokenizer(kind: type, rows: Any, words: Path, tmp_path: Path) -> None:
    stage = kind(**{"shards" if kind is StreamData else "files": rows({"text": "a"})})
    assert told(HfModel(config=tiny_llama_config()), stage) == [NONE]
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_text(json.dumps(tiny_llama_config()))
    assert told(HfModel(path=str(tmp_path / "bare")), stage) == [NONE]
    assert told(HfModel(path=str(words)), stage) == []
    assert told(HfModel(config=tiny_llama_config(), tokenizer=str(words)), stage) == []
    assert told(HfModel(), stage) == []  # given by the model slot
    assert told(HfModel(path="owner/name"), stage) == []


@pytest.mark.parametrize(
    ("row", "fields", "refused"),
    [
        (CHAT, {}, True),
        (CHAT, {"template": False}, True),
        ({"prompt": "a", "completion": "b"}, {}, True),
        ({"prompt": "a", "completion": "b"}, {"template": False}, False),
        ({"text": "a"}, {}, False),
        ({"other": "a"}, {"form": "alpaca"}, True),
        ({"other": "a"}, {}, False),
    ],
)
def test_a_tokenizer_without_a_chat_template(
    row: object, fields: dict[str, Any], refused: bool, rows: Any, words: Path
) -> None:
    found = told(HfModel(path=str(words)), ChatData(files=rows(row), **fields))
    assert [each.partition(",")[0] for each in found] == ["needs a chat template"] * refused


@pytest.mark.parametrize("place", ["a file", "the config"])
def test_a_chat_template_is_found(place: str, rows: Any, words: Path) -> None:
    if place == "a file":
        (words / "chat_template.jinja").write_text("x")
    else:
        file = words / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": "x"}))
    assert told(HfModel(path=str(words)), ChatData(files=rows(CHAT))) == []


def test_a_folder_without_a_model_is_a_mistake_of_the_model_slot(tmp_path: Path, rows: Any) -> None:
    (tmp_path / "run/export").mkdir(parents=True)
    (tmp_path / "run/recipe.yaml").write_text("name: r\n")
    model = HfModel(path=str(tmp_path / "run"))
    assert told(model, ChatData(files=rows(CHAT), sequence_length=8)) == []
    command = f"`pipe export {tmp_path}/run --out FOLDER` writes its model"
    plan = plan_view({"model": model})
    assert [problem.hint for problem in model.check(plan)] == [f"it is a run; {command}"]
    (tmp_path / "run/export/config.json").write_text("{}")
    meant = f"it is a run; its model is {tmp_path}/run/export"
    assert [problem.hint for problem in model.check(plan)] == [meant]
