"""Values that are written into a recipe's text: one leaf of it changes, or nothing is written."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import Location
from pipeline.recipe.dump import reads_back, render, with_value
from pipeline.recipe.load import read_recipe
from pipeline.recipe.nodes import plain
from pipeline.recipe.parse import parse

COMMIT = "c" * 40
PATH = ("stages", "model", "revision")
KEYS = ("use", "path", "revision", "tokenizer", "attention")


def values(text: str) -> Any:
    root, problems = parse(text, locate=lambda *_: Location(file=""), folder=Path("/"))
    assert root is not None, problems
    assert not problems
    return plain(root)


def pinned(text: str) -> str | None:
    return with_value(text, PATH, COMMIT, after="path", note="main")


@pytest.mark.parametrize(
    "text",
    [
        # an alias: the anchor stands for something else
        "name: &r main\nstages:\n  model: {path: a/b, revision: *r}\n",
        # others take the value, or the whole mapping, from here
        "stages:\n  model: {path: a/b, revision: &r main}\n  data: {revision: *r}\n",
        "stages:\n  model: &m {path: a/b}\n  other: *m\n",
        "stages:\n  other: &m {path: a/b}\n  model: *m\n",
        # the name's line is in another slot
        "stages:\n  data:\n    dataset: &p a/b\n  model:\n    path: *p\n    use: model.hf\n",
        "stages:\n  model:\n    ? path\n    : a/b\n",
        "stages:\n  model: {path: a/b, revision}\n",
        "stages: {model: {use: model.hf}}\n",
        "stages: {}\n",
        "stages: [1]\n",
        "",
    ],
)
def test_what_would_change_something_else_is_not_written(text: str) -> None:
    assert pinned(text) is None


@given(text=st.text(max_size=20) | st.sampled_from(["./", "../x", "${", "\\${a}", "???", "=1"]))
def test_what_reads_back_is_read_back(text: str) -> None:
    recipe = Path(tempfile.mkdtemp()) / "x.yaml"
    content = {"name": "x", "stages": {"a": {"use": "a.b", "c": [text]}}}
    recipe.write_text(render(content), encoding="utf-8", newline="")
    read, problems = read_recipe(recipe)
    held = read is not None and not problems and read.stages["a"].fields["c"] == [text]
    assert reads_back(text) == held


@st.composite
def layouts(draw: st.DrawFn) -> str:
    """Return a recipe whose model slot has a path, in one of many layouts, with anchors."""
    anchors: list[str] = []

    def scalar(value: str) -> str:
        if anchors and draw(st.integers(0, 5)) == 0:
            return f"*{draw(st.sampled_from(anchors))}"
        style = draw(st.sampled_from(["{}", "'{}'", '"{}"', "&A {}", "&A '{}'", "|\n          {}"]))
        if "&A" in style:
            anchors.append(f"a{len(anchors)}")
            style = style.replace("A", anchors[-1])
        return style.format(value)

    def mapping(keys: list[str], column: int) -> str:
        space = " " * column
        if draw(st.booleans()):
            made = []
            for key in keys:
                value = scalar(key).replace("|\n          ", "")
                quote = draw(st.sampled_from(["", "'", '"']))
                made.append(draw(st.sampled_from([f"{quote}{key}{quote}: {value}", key])))
            gap = draw(st.sampled_from([", ", f",\n{space}", f", # a\n{space}"]))
            anchor = draw(st.sampled_from(["", "&m "]))
            return f" {anchor}{{{gap.join(made)}}}"
        lines = []
        for key in keys:
            value, note = scalar(key), draw(st.sampled_from(["", "  # a note", "\n\n# apart"]))
            note = "" if "|" in value else note
            form = draw(st.sampled_from(["{0}: {1}", "{0}: {1}", "? {0}\n{2}: {1}", "{0}:"]))
            lines.append(f"{space}{form.format(key, value, space)}{note}")
        return "\n" + "\n".join(lines)

    keys = draw(st.permutations(KEYS))
    keys = [key for key in keys if key == "path" or draw(st.booleans())]
    before, after = (mapping(["path", "x"], 4) for _ in range(2))
    text = f"stages:\n  one:{before}\n  model:{mapping(keys, 4)}\n  two:{after}\n"
    if "&m" in text and draw(st.booleans()):
        text += "  three: *m\n"
    end = draw(st.sampled_from(["\n", "\r\n"]))
    return text.replace("\n", end).removesuffix(draw(st.sampled_from(["", end])))


@given(text=layouts())
def test_one_leaf_changes(text: str) -> None:
    try:
        before = values(text)
    except AssertionError:  # two anchors of a name, or an alias as a key
        return
    made, slot = pinned(text), before["stages"]["model"]
    if made is None:  # never in a plain layout
        odd = any(one in text for one in "&*?|") or "revision" in text or "path:" not in text
        assert odd or slot["path"] is None
        return
    slot["revision"] = COMMIT
    assert values(made) == before
    assert made.count("#") - text.count("#") in (0, 1)  # comments stay; a new line has one
    assert len(made) < len(text) + 100
