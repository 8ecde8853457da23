"""Mistakes in the fields of data stages that show without reading more than first rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.testing import plan_view
from pipeline.testing import problems as recipe_problems
from stages.data.sources import Source
from stages.data.stages import ChatData, ChatSource, TextData

HUB = {"dataset": "owner/name", "revision": "0" * 40}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [("files", "no file is named")]),
        ({"files": ()}, [("files", "no file is named")]),
        ({"files": "no*.txt"}, [("files", "no such file: no*.txt")]),
        ({"files": "a.csv"}, [("files", "a.csv: unknown kind of file")]),
        ({"files": ("a.txt", "*.txt")}, [("files", "a.txt is named twice")]),
        ({"files": "a.txt", "heldout_files": "*.txt"},
         [("heldout_files", "a.txt is also trained on")]),
        ({"files": "a.txt", "heldout_files": "b.txt", "heldout_fraction": 0.1},
         [("heldout_fraction", "excludes `heldout_files`")]),
        ({"files": "a.txt", "sources": (Source(files="b.txt"),)},
         [("files", "excludes `sources`")]),
        ({"sources": (Source(),)}, [("sources.0.files", "no file is named")]),
        ({"sources": (Source(files="a.txt"), Source(files="*.txt"))},
         [("sources.1", "a.txt is in sources[0] already")]),
        ({"sources": (Source(files="a.txt", revision="main"),)},
         [("sources.0.revision", "`revision` is only for a hub `dataset`")]),
        ({"sources": (Source(files="a.txt", **HUB),)}, [("sources.0.files", "excludes `dataset`")]),
        ({"sources": (Source(dataset="./here", revision="0" * 40),)},
         [("sources.0.dataset", "'./here' is not a hub id (owner/name)")]),
        ({"sources": (Source(dataset="owner/name"),)}, []),
        ({"sources": (Source(dataset="owner/name", revision="a b"),)},
         [("sources.0.revision", "'a b' is not a commit, branch or tag")]),
        ({"sources": (Source(dataset="owner/name", revision="v1"),)}, []),
        ({"sources": (Source(**HUB),), "heldout_sources": (Source(**HUB),)},
         [("heldout_sources.0", "owner/name/train is also trained on")]),
        ({"sources": (Source(**HUB),), "heldout_sources": (Source(**HUB, split="test"),)}, []),
        ({"files": "a.txt", "heldout_files": "b.txt", "heldout_sources": (Source(**HUB),)},
         [("heldout_sources", "excludes `heldout_files`")]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stage", [ChatData, TextData])
def test_settings(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: Any,
    fields: Any,
    expected: list[tuple[str, str]],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "a.csv"):
        Path(name).write_text("x")
    found = [(problem.key, problem.message) for problem in stage(**fields).check(plan_view())]
    assert found == expected


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf")])
def test_weights(weight: float) -> None:
    (problem,) = recipe_problems(ChatData, {"sources": [{"files": "a.txt", "weight": weight}]})
    assert problem.key == "sources.0.weight"


@pytest.mark.parametrize("bad", ["tomorrow", "2024-02-30", "20240726", "26 Jul 2024"])
def test_what_is_no_date(tmp_path: Path, bad: str) -> None:
    (tmp_path / "a.txt").write_text("x")
    (problem,) = ChatData(files=str(tmp_path / "a.txt"), today=bad).check(plan_view())
    assert str(problem) == f"today: {bad!r} is not a date (write it as YYYY-MM-DD)"


def test_each_turn_and_every_token_exclude_each_other() -> None:
    found = [str(each) for each in ChatData(files="x", turns="each", loss="all").check(plan_view())]
    assert any(each.startswith("turns: trains each answer") for each in found)


@pytest.mark.parametrize(
    ("fields", "key", "message"),
    [
        ({"columns": {"mesages": "x"}}, "columns.mesages", "is not a key of a row or a"),
        ({"columns": {"prompt": "x", "text": "x"}}, "columns.text", "'x' is `prompt` already"),
        ({"role_names": {"bot": "asistant"}}, "role_names.bot",
         "'asistant' is not a role (did you mean `assistant`?)"),
        ({"sources": (ChatSource(files="a.txt", role_names={"bot": "x"}),), "files": ()},
         "sources.0.role_names.bot", "'x' is not a role (known here: system, developer, "
         "user, assistant, tool, function_call; `roles` adds others)"),
    ],
)  # fmt: skip
def test_mistakes_in_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: Any, key: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("x")
    (problem,) = ChatData(**{"files": "a.txt", **fields}).check(plan_view())
    assert problem.key == key
    assert f"{problem.message} ({problem.hint})".startswith(message)


def test_the_recipe_s_check_knows_the_fields() -> None:
    fields = {"columns": {"messages": "dialog"}, "role_names": {"bot": "user"}}
    assert [problem.key for problem in recipe_problems(ChatData, fields)] == ["files"]
    found = recipe_problems(ChatData, {**fields, "columns": {"messages": 3}})
    assert [problem.key for problem in found] == ["columns.messages"]
