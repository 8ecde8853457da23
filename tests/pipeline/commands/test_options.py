"""Completion in shells, through click's protocol and, if it is there, in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import main
from tests.support.tiny_project import tiny_project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a recipe, two runs in `runs` and one beside it."""
    folder = tmp_path_factory.mktemp("project")
    recipe = tiny_project(folder)
    for run in ("runs/tiny-1", "runs/tiny-2", "mine"):
        (folder / run).mkdir(parents=True)
        shutil.copy(recipe, folder / run / "recipe.yaml")
    return folder


@pytest.fixture(autouse=True)
def _here(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)


def complete(*words: str) -> list[str]:
    """Return what bash is offered for the last of the words."""
    asked = {
        "_PIPE_COMPLETE": "bash_complete",
        "COMP_WORDS": "\n".join(["pipe", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = CliRunner().invoke(main, prog_name="pipe", env=asked)
    assert (done.exit_code, done.stderr) == (0, "")
    return [line.removeprefix("plain,") for line in done.stdout.split()]


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("bash", "complete -o nosort -F _pipe_completion pipe"),
        ("zsh", "#compdef pipe"),
        ("fish", "complete --no-files --command pipe"),
    ],
)
def test_the_script(shell: str, line: str) -> None:
    printed = CliRunner().invoke(main, ["completion", shell])
    assert printed.exit_code == 0
    assert line in printed.stdout
    assert f"_PIPE_COMPLETE={shell}_complete" in printed.stdout
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=printed.stdout, text=True, check=True)


def test_an_unknown_shell() -> None:
    refused = CliRunner().invoke(main, ["completion", "csh"])
    assert refused.exit_code == 2
    assert "'csh' is not one of 'bash', 'zsh', 'fish'" in refused.stderr


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["pro"], ["profile"]),
        (["run", "--dry"], ["--dry-run"]),
        (["run", "t"], ["tiny.yaml", "tokenizer/"]),
        (["run", "./t"], ["./tiny.yaml", "./tokenizer/"]),
        (["run", "runs/tiny-1/"], ["runs/tiny-1/recipe.yaml"]),
        (["resume", "./runs/"], ["./runs/tiny-1", "./runs/tiny-2"]),
        (["compare", "runs/tiny-1", "runs/tiny-"], ["runs/tiny-1", "runs/tiny-2"]),
        (["cp", "smollm_z"], ["smollm_zero1", "smollm_zero2", "smollm_zero3", "smollm_zero3_nvme",
                              "smollm_zero3_offload"]),
        (["stages", "wrap."], ["wrap.accelerate", "wrap.ddp", "wrap.fsdp", "wrap.zero"]),
        (["run", "tiny.yaml", "train.eval_"], ["train.eval_every=", "train.eval_first=",
                                              "train.eval_last="]),
        (["run", "tiny.yaml", "launch.p"], ["launch.procs="]),
        (["run", "tiny.yaml", "wrap.use=wrap.f"], ["wrap.use=wrap.fsdp"]),
        (["resume", "runs/tiny-1", "train.result="], ["train.result=last", "train.result=best"]),
        (["track", "runs/tiny-1", "train.result="], ["train.result=last", "train.result=best"]),
        (["dag", "mine", "train.shuffle="], ["train.shuffle=true", "train.shuffle=false"]),
        (["run", "tiny.yaml", "checkpoint.takes."], ["checkpoint.takes.engine=",
                                                     "checkpoint.takes.model="]),
        (["run", "tiny.yaml", "wrap.takes.model="], [f"wrap.takes.model={slot}" for slot in
                                                     ("model", "precision", "data", "optimizer")]),
        # bash divides words at `=`
        (["run", "tiny.yaml", "wrap.use", "=", "wrap.f"], ["wrap.fsdp"]),
        (["run", "tiny.yaml", "train.result", "="], ["last", "best"]),
        (["run", "tiny.yaml", "train.steps", "=", "9", "model.i"], ["model.init="]),
        # nothing, and no message
        (["run", "tiny.yaml", "optimizer.lr="], []),
        (["run", "nothing.yaml", "train."], []),
        (["run", "nowhere/t"], []),
        (["status", "nowhere/"], []),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_is_offered(words: list[str], offered: list[str]) -> None:
    assert sorted(complete(*words)) == sorted(offered)


def test_runs_come_newest_first(project: Path) -> None:
    one, two = (project / f"runs/tiny-{number}/recipe.yaml" for number in (1, 2))
    for times, order in (((1, 2), [2, 1]), ((3, 2), [1, 2])):
        for file, time in zip((one, two), times, strict=True):
            os.utime(file, (time, time))
        assert complete("status", "runs/") == [f"runs/tiny-{number}" for number in order]
