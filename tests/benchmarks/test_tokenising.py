"""benchmarks/tokenising.py on a few kilobytes, with a tokenizer of bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.stages.data.fakes import FakeSource

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "tokenising.py"


def test_every_way_is_measured_and_gives_as_many_tokens(tmp_path: Path) -> None:
    FakeSource().fast.save_pretrained(tmp_path / "tokenizer")
    file = tmp_path / "found.json"
    options = ["--text", "0.02", "--chat", "0.02", "--rounds", "1", "--json", str(file)]
    command = [sys.executable, str(PROGRAM), "--tokenizer", str(tmp_path / "tokenizer"), *options]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("\n| --- |") == 3
    rows = json.loads(file.read_text("utf-8"))["rows"]
    assert [*dict.fromkeys(row["case"] for row in rows)] == ["documents", "one file", "chat"]
    assert len(rows) == 9
    for row in rows:
        (run,) = row["rounds"]
        assert run["tokens"] > 15_000
        assert run["seconds"] >= run["call"] > 0
        assert run["cpu"] > 0
