"""Each example of moving from another tool gives the recipe that the page shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.blocks import ROOT, blocks
from tests.support.command import pipe

PAGE = ROOT / "docs" / "migrating.md"
EXAMPLES = {
    block.note.removeprefix("example="): block.text.split()
    for block in blocks(PAGE, "sh")
    if block.note.startswith("example=")
}
CODES = {"llama-factory": 3}
"""Exit codes of examples that lose a setting."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files of the page, and a row of data."""
    for block in blocks(PAGE):
        if block.note.startswith("file="):
            (tmp_path / block.note.removeprefix("file=")).write_text(block.text)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def differences(shown: Any, made: Any, path: str = "") -> list[str]:
    """Return where `made` lacks something of `shown`, or has something else."""
    if isinstance(shown, dict) and isinstance(made, dict):
        return [
            line
            for key, value in shown.items()
            for line in differences(value, made.get(key, "nothing"), f"{path}.{key}")
        ]
    return [] if shown == made else [f"{path}: {made}, the page shows {shown}"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_gives_what_is_shown(name: str, folder: Path) -> None:
    (shown,) = [block.text for block in blocks(PAGE, "yaml") if block.note == f"result={name}"]
    result = pipe(*EXAMPLES[name][1:])
    unfinished = any(
        line.startswith(("fill in ", "pipe check: model.path: no such folder"))
        for line in result.stderr.splitlines()
    )
    assert result.exit_code == CODES.get(name, 3 if unfinished else 0), result.stderr
    made = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert differences(yaml.safe_load(shown), made) == []
    if name in CODES:
        assert "refused" in result.stderr


def test_every_tool_has_an_example() -> None:
    assert list(EXAMPLES) == [
        "trainer", "trl", "accelerate", "deepspeed", "axolotl", "llama-factory", "torchtune",
    ]  # fmt: skip
