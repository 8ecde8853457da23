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
    found = json.loads(file.read_text("utf-8"))
    assert [*found] == ["documents", "one file", "chat"]
    for ways in found.values():
        assert len(ways) == 3
        for runs in ways.values():
            assert runs["0"]["tokens"] > 15_000
            assert runs["0"]["seconds"] >= runs["0"]["call"] > 0
            assert runs["0"]["cpu"] > 0
