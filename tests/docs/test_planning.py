"""The plan that docs/planning.md shows is what its command prints today."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import main
from tests.docs.blocks import ROOT, blocks, commands

PAGE = ROOT / "docs" / "planning.md"


def test_the_plan_that_is_shown_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # without runs that have measured memory
    shown = next(blocks(PAGE, "text")).text.splitlines()
    words = next(one.words for one in commands(PAGE) if "--interconnect" in shlex.join(one.words))
    result = CliRunner().invoke(main, [words[0], str(ROOT / words[1]), *words[2:]])
    assert result.exit_code == 0, result.output
    assert [line for line in shown if line not in {*result.output.splitlines(), "..."}] == []
    assert len(shown) > 10
