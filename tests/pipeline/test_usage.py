"""Hints for commands and options that there are not."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from pipeline.cli import main


def refused(words: str) -> str:
    """Return the last line of an error."""
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 2
    return result.stderr.splitlines()[-1].removeprefix("Error: ")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("rnu", "did you mean `run`?"),
        ("stats", "did you mean `status`?"),
        ("train", "did you mean `run`?"),
        ("r.yaml", "write: pipe run r.yaml"),
        ("eval", "it is a slot of a recipe: `pipe stages evaluate.lm` explains it"),
        ("ema", "it is a slot of a recipe: `pipe stages average.ema` explains it"),
        ("exprt", "did you mean `export`?"),
        ("xyzzy", "pipe --help lists them"),
    ],
)
def test_a_command_that_there_is_not(typed: str, meant: str) -> None:
    assert refused(typed) == f"no command is called {typed} ({meant})"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("run w.yaml --output x", "there is no option --output (--run-dir names the folder of a"),
        ("export w --output x", "there is no option --output (--out names what is written)"),
        ("check --config w.yaml", "there is no option --config (the recipe needs no option"),
        # these commands have nothing that is meant
        ("dag w.yaml --format json", "No such option '--format'."),
        ("check w.yaml --resume", "No such option '--resume'."),
        ("ls --config w.yaml", "No such option '--config'."),
        ("check", "name a recipe, a YAML file (pipe init writes one"),
    ],
)
def test_an_option_of_another_program(typed: str, said: str) -> None:
    assert refused(typed).startswith(said)
