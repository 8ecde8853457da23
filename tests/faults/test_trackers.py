"""A tracker learns that a run has failed, whichever rank has, and no process of it is left."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from typing import Any

import pytest

from tests.support.pipe import Pipe


@pytest.mark.parametrize(
    "fault",
    [
        {"fault": "kill", "rank": 0},
        {"fault": "raise", "rank": 0},
        {"fault": "raise", "rank": 1, "peers": "collective"},
    ],
)
def test_a_failure_is_sent(pipe: Pipe, fault: dict[str, Any]) -> None:
    file = pipe.recipe(procs=2, train=fault)
    recipe = json.loads(file.read_text())
    recipe["stages"]["track"] = {"use": "track.sqlite", "file": "./runs.sqlite"}
    recipe["stages"] = {slot: recipe["stages"][slot] for slot in ("track", "declare", "train")}
    file.write_text(json.dumps(recipe))
    result = pipe.run(file)
    assert result.code == 1, result.stderr
    with contextlib.closing(sqlite3.connect(pipe.folder / "runs.sqlite")) as found:
        assert found.execute("select outcome from runs").fetchall() == [("failed",)]
