"""The command line: help, errors, what it imports and how long it takes."""

from __future__ import annotations

import errno
import re
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from pipeline import cli
from pipeline.commands.options import JSON_HELP
from pipeline.errors import StageError


def fails_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Result:
    @click.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli.Commands, "get_command", lambda self, ctx, name: fail)
    return CliRunner().invoke(cli.main, ["fail"])


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (StageError("the disk is full", hint="make room"), 1,
         "error: the disk is full (make room)\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)  # fmt: skip
def test_errors_for_people(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = fails_with(error, monkeypatch)
    assert (result.exit_code, result.stderr) == (code, said)


def test_what_another_user_owns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    file = tmp_path / "run" / "recipe.yaml"
    denied = PermissionError(errno.EACCES, "Permission denied", str(file))
    result = fails_with(denied, monkeypatch)
    how = "chgrp -R and chmod -R g+rX"
    owner = f"{tmp_path} belongs to {tmp_path.owner()}, who can open it with {how}"
    assert result.stderr == f"error: Permission denied: {file} ({owner})\n"
    assert result.exit_code == 2


def test_a_bug_leaves_its_traceback_in_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("PIPE_DEBUG", raising=False)
    result = fails_with(ZeroDivisionError("by zero"), monkeypatch)
    (file,) = tmp_path.glob("pipe-*.txt")
    said = f"error: a bug in pipe: ZeroDivisionError: by zero (please report it with {file})\n"
    assert (result.exit_code, result.stderr) == (1, said)
    assert "Traceback" in file.read_text("utf-8")
    monkeypatch.setenv("PIPE_DEBUG", "1")
    result = fails_with(ZeroDivisionError("by zero"), monkeypatch)
    assert isinstance(result.exception, ZeroDivisionError)


def test_every_command_is_under_its_heading() -> None:
    assert len(cli.COMMANDS) == sum(map(len, cli.HEADINGS.values()))
    shown = CliRunner().invoke(cli.main, ["--help"]).output
    for heading, commands in cli.HEADINGS.items():
        section = shown.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in section.splitlines()] == [*commands]
        assert all(summary for _, summary in commands.values())


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_help(name: str) -> None:
    """It is in plain English, and options that commands share have one wording."""
    result = CliRunner().invoke(cli.main, [name, "-h"])
    assert result.exit_code == 0, result.output
    words = r"behind|besides?|anew|alone|bear|lend|tell of|those of|that of|of its own"
    assert re.findall(rf"(?<!-)\b(?:{words})\b", result.output) == []
    command = cli.main.get_command(click.Context(cli.main), name)
    assert command is not None
    said = {opt: one for one in command.params for opt in one.opts if opt.startswith("--")}
    if "--json" in said:
        assert said["--json"].help == JSON_HELP
    if "--out" in said:
        assert said["--out"].opts == ["-o", "--out"]
    assert not {"--to", "--output", "--output-dir"} & set(said) or name == "convert"
    for option in said.values():
        assert option.help, f"{name} {option.opts}: no help"
        assert not re.search(r"\(?default:|by default", option.help.lower())
        assert option.help[0].isupper()
        assert re.sub(r" \[.*\]$", "", option.help).endswith(".")


HEAVY = {"torch", "transformers", "deepspeed", "accelerate", "numpy", "pyarrow"}
PROGRAM = """\
import sys
from pipeline.cli import main
try:
    main(sys.argv[1:])
finally:
    print(*sys.modules, file=sys.stderr)
"""


LIBRARIES = "import click, omegaconf, pydantic, sys, yaml; print(*sys.modules, file=sys.stderr)"


def spend(*args: str, program: str = PROGRAM) -> tuple[float, set[str], str]:
    """Return the processor time of a command that succeeds (waiting for other processes does not
    count), the modules that it imported, and its output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, set(done.stderr.splitlines()[-1].split()), done.stdout


def test_help_imports_next_to_nothing() -> None:
    _, modules, output = spend("--help")
    assert all(name in output for name in cli.COMMANDS)
    assert not modules & {*HEAVY, "yaml", "pydantic", "omegaconf"}
    assert not any(name.startswith("pipeline.commands") for name in modules)


def test_planners_import_no_torch() -> None:
    """A plan of a model whose profile is known needs none."""
    program = (
        "import sys; from importlib.metadata import entry_points\n"
        "for one in entry_points(group='pipe.planners'): one.load()\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    _, modules, _ = spend(program=program)
    assert "stages.planners" in modules
    assert not modules & {"torch", "transformers", "deepspeed"}


RECIPE = """\
name: r
seed: 1
stages:
  precision: {use: precision.policy}
  again: {use: precision.policy, compute: '${..precision.use}'}
"""


@pytest.mark.parametrize(
    "args",
    [
        "--help", "--version", "stages", "stages train.causal_lm", "doctor --help",
        "check r.yaml again.compute=bf16",
    ],
)  # fmt: skip
def test_commands_are_lean(args: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    Path("r.yaml").write_text(RECIPE, encoding="utf-8")
    for _ in range(3):
        seconds, modules, _ = spend(*args.split())
        assert not modules & HEAVY
        if seconds < 5 * spend(program=LIBRARIES)[0]:  # as slow as the machine is now
            return
    raise AssertionError(seconds)


CLOSED = """
import os, pty
master, slave = pty.openpty()
os.dup2(slave, 1)
os.dup2(slave, 2)
os.close(master)
from pipeline.cli import main
main(["check", "missing.yaml"])
"""


def test_a_closed_terminal_changes_no_exit_code(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", CLOSED], cwd=tmp_path, check=False).returncode == 2


def test_what_libraries_tell_each_other_is_not_on_a_command_s_screen() -> None:
    program = (
        "import logging, sys; from pipeline.cli import main\n"
        "try: main(['stages', 'optimizer.lion'])\n"
        "except SystemExit: pass\n"
        "logging.getLogger('torchao').warning('Failed to load x.so')\n"
        "logging.getLogger('another').warning('heard')"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.stderr == "heard\n"
