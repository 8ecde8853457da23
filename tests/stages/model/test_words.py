"""Facts on the model's tokenizer that a data slot has before a start."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.testing import plan_view
from pipeline.testing.helpers import checked
from stages.data.chat import ChatData
from stages.data.text import StreamData, TextData
from stages.model.hf import HfModel
from tests.support.models import save_tokenizer, tiny_llama_config

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
def rows(tmp_path: Path) -> Any:
    def make(row: object) -> str:
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        return str(tmp_path / "rows.jsonl")

    return make


def folder(tmp_path: Path, template: bool) -> Path:
    (tmp_path / "m").mkdir()
    save_tokenizer(tmp_path / "m")
    (tmp_path / "m/config.json").write_text(json.dumps(tiny_llama_config()))
    if not template:
        (tmp_path / "m/chat_template.jinja").unlink()
    return tmp_path / "m"


@pytest.mark.parametrize("kind", [TextData, ChatData, StreamData])
def test_a_model_without_a_tokenizer(kind: type, rows: Any, tmp_path: Path) -> None:
    stage = kind(**{"shards" if kind is StreamData else "files": rows({"text": "a"})})
    assert told(HfModel(config=tiny_llama_config()), stage) == [NONE]
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_text(json.dumps(tiny_llama_config()))
    assert told(HfModel(path=str(tmp_path / "bare")), stage) == [NONE]
    words = folder(tmp_path, template=False)
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
    row: object, fields: dict[str, Any], refused: bool, rows: Any, tmp_path: Path
) -> None:
    model = HfModel(path=str(folder(tmp_path, template=False)))
    found = told(model, ChatData(files=rows(row), **fields))
    assert [each.partition(",")[0] for each in found] == ["needs a chat template"] * refused


@pytest.mark.parametrize("place", ["a file", "the config"])
def test_a_chat_template_is_found(place: str, rows: Any, tmp_path: Path) -> None:
    words = folder(tmp_path, template=place == "a file")
    if place == "the config":
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
