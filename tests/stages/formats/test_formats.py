"""A live checkpoint, inspected and converted to every format."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.checkpoint.formats import Formats, Reading
from pipeline.cli import main
from tests.support.formats import digest_of, same
from tests.support.matrix import Matrix

NAME = "zero3 on 3, adamw"


@pytest.mark.parametrize("form", ["full", "dcp", "deepspeed"])
def test_the_live_state_is_in_every_format(form: str, matrix: Matrix, tmp_path: Path) -> None:
    place = matrix.checkpoint(NAME)
    said = CliRunner().invoke(main, ["convert", str(place), str(tmp_path / form), "--to", form])
    assert said.exit_code == 0, said.output
    there = tmp_path / form / place.name if form == "full" else tmp_path / form
    source = Formats.installed().get(form).open(there, Reading())
    assert digest_of(source) == same(matrix.saved(NAME)["half"])


def test_a_live_checkpoint_is_inspected(matrix: Matrix) -> None:
    said = CliRunner().invoke(main, ["inspect", str(matrix.checkpoint(NAME)), "--verify"])
    assert said.exit_code == 0, said.output
    lines = said.stdout.splitlines()
    assert "by          3 processes" in lines
    assert "alias       lm_head.weight is model.embed_tokens.weight" in lines
    assert lines[-1] == "verified    every byte is correct"
