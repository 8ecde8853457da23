"""A rank under another launcher."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.execution.run_spec import RunSpec
from pipeline.launch import start
from pipeline.utils import terminal


def test_a_rank_that_has_read_no_recipe_shows_what_is_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(3):
        monkeypatch.setenv(f"ANY_{number}", f"exp-4{number}")
    monkeypatch.setattr("pipeline.execution.worker.run_rank", lambda *_: None)
    terminal.hide_environment()
    store: Any = None
    recipe = {"name": "x", "stages": {"data": {"use": "data.text", "files": ["in/exp-40.txt"]}}}
    start._run_as_rank(RunSpec(run_dir="runs/exp-41", recipe=recipe), store)
    assert terminal.shown("exp-40 exp-41 exp-42") == "exp-40 exp-41 $ANY_2"
