"""The commands, used by a person and by a program."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from pipeline import cli
from pipeline.commands.options import JSON_HELP
from pipeline.errors import StageError
from pipeline.recipe import load_recipe

RECIPE = """\
name: good
env: [PIPE_SECRET]
stages:
  model: {use: model.fake}
  data:
    use: data.text
    files: [./a.txt]
    note: ${oc.env:PIPE_SECRET}
  optimizer: {use: optimizer.adam, lr: 1e-4}
  wrap: {use: wrap.red, offload: {device: cpu}}
  train: {use: train.lm, steps: "${stages.data.length}"}
"""
RECIPE = RECIPE.replace("    note:", "    length: 4\n    note:")


@pytest.fixture
def good(pipe: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("PIPE_SECRET", "hunter2")
    Path("r.yaml").write_text(RECIPE, encoding="utf-8")
    return pipe


def test_check_json(good: Callable[..., Result]) -> None:
    result = good("check", "r.yaml", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "ok": True,
        "name": "good",
        "stages": [
            {"slot": "model", "use": "model.fake"},
            {"slot": "data", "use": "data.text"},
            {"slot": "optimizer", "use": "optimizer.adam"},
            {"slot": "wrap", "use": "wrap.red"},
            {"slot": "train", "use": "train.lm"},
        ],
        "problems": [],
        "warnings": [],
        "notes": [],
    }


def test_check_json_of_a_broken_recipe(good: Callable[..., Result]) -> None:
    result = good("check", "r.yaml", "--json", "model.layer=0")
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {
        "ok": False,
        "problems": [
            {
                "file": "command line, override 1",
                "line": None,
                "column": None,
                "key": "model.layer",
                "message": "unknown field",
                "hint": "did you mean `layers`?",
            }
        ],
    }


def test_show_fills_in_defaults_and_runs_again(good: Callable[..., Result]) -> None:
    result = good("show", "r.yaml", "train.shuffle=false")
    assert result.exit_code == 0
    here = Path.cwd()
    assert (
        result.stdout
        == f"""\
name: good
seed: 0
launch:
  procs: null
  nodes: null
  device: auto
  threads: null
  restarts:
    limit: 3
    backoff: 5.0
    max_backoff: 300.0
  timeouts:
    rendezvous: 600.0
    node: 10.0
    collectives: 1800.0
    step: 1800.0
    save: 1800.0
    load: 3600.0
env: [PIPE_SECRET]
dry_run: false
stages:
  model:
    use: model.fake
    path: null
    layers: 2
  data:
    use: data.text
    files: [{here}/a.txt]
    length: 4
    note: ${{oc.env:PIPE_SECRET}}
    split: none
  optimizer:
    use: optimizer.adam
    lr: 0.0001
    betas: [0.9, 0.999]
  wrap:
    use: wrap.red
    stage: 2
    offload:
      device: cpu
      path: null
      pin: true
    extra: null
  train:
    use: train.lm
    steps: 4
    shuffle: false
"""
    )
    Path("again.yaml").write_text(result.stdout, encoding="utf-8")
    assert good("show", "again.yaml").stdout == result.stdout
    assert good("check", "again.yaml").exit_code == 0


def test_show_origin(good: Callable[..., Result]) -> None:
    result = good("show", "r.yaml", "train.shuffle=false", "--origin")
    comments = dict(line.split("  # ") for line in result.stdout.splitlines() if "  # " in line)
    origins = {line.strip(): place for line, place in comments.items()}
    assert origins["name: good"] == "r.yaml:1:7"
    assert origins["seed: 0"] == "default"
    assert origins["length: 4"] == "r.yaml:8:13"
    assert origins["steps: 4"] == "r.yaml:12:33"
    assert origins["stage: 2"] == "default"
    assert origins["device: cpu"] == "r.yaml:11:43"
    assert origins["pin: true"] == "default"
    assert origins["shuffle: false"] == "command line, override 1"
    Path("again.yaml").write_text(result.stdout, encoding="utf-8")
    assert load_recipe("again.yaml").stages["train"].fields == {"steps": 4, "shuffle": False}


def test_show_json(good: Callable[..., Result]) -> None:
    shown = json.loads(good("show", "r.yaml", "--json").stdout)
    assert shown["stages"]["train"] == {"use": "train.lm", "steps": 4, "shuffle": True}
    assert shown["stages"]["data"]["note"] == "${oc.env:PIPE_SECRET}"
    both = json.loads(good("show", "r.yaml", "--json", "--origin").stdout)
    assert both["recipe"] == shown
    assert both["origins"]["stages.optimizer.lr"] == "r.yaml:10:40"
    assert both["origins"]["stages.wrap.stage"] == "default"


def test_show_of_a_run_folder(good: Callable[..., Result]) -> None:
    Path("runs/one").mkdir(parents=True)
    Path("runs/one/recipe.yaml").write_text(load_recipe("r.yaml").dump(), encoding="utf-8")
    assert good("show", "runs/one").stdout == good("show", "r.yaml").stdout


def test_show_of_a_broken_recipe(good: Callable[..., Result]) -> None:
    result = good("show", "r.yaml", "train.steps=0", "seed=x")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "command line, override 1: train.steps: must be at least 1, not `0`",
        "command line, override 2: seed: must be a whole number, not the text `x`",
    ]


def test_stages_are_listed(pipe: Callable[..., Result]) -> None:
    lines = pipe("stages").stdout.splitlines()
    assert "model.fake       pipetrain 1.0      Declare a model." in lines
    (broken,) = [line for line in lines if line.startswith("broken.missing")]
    assert "faulty-plugin 1.0  cannot be used: stage `broken.missing`" in broken
    listed = {each["name"]: each for each in json.loads(pipe("stages", "--json").stdout)}
    assert listed["wrap.red"] == {
        "name": "wrap.red",
        "distribution": "pipetrain",
        "version": "1.0",
        "summary": "Wrap in red.",
        "error": "",
    }


def test_one_stage_is_explained(pipe: Callable[..., Result]) -> None:
    assert (
        pipe("stages", "wrap.red").stdout
        == """\
wrap.red (pipetrain 1.0)

Wrap in red.

needs: model (ModelSource), optimizer (OptimizerPlan)
returns: RedEngine

fields:
  stage: 1 | 2 | 3 (default 2)
      How much.
  offload: none | mapping | null (default none)
      Where to.
  offload.device: cpu | nvme (required)
      Which memory.
  offload.path: path | null (default null)
      The disk.
  offload.pin: bool (default true)
      Use page-locked memory.
  extra: mapping of anything | null (default null)
      Raw settings.
"""
    )
    fields = json.loads(pipe("stages", "model.fake", "--json").stdout)["fields"]
    assert fields[1] == {
        "name": "layers",
        "type": "int",
        "default": "2",
        "range": ">= 1, <= 100",
        "doc": "How many.",
    }
    optional = json.loads(pipe("stages", "train.lm", "--json").stdout)["needs"]
    assert optional[-1] == {"parameter": "checkpoints", "type": "Checkpoints", "optional": True}


def test_an_unknown_stage(pipe: Callable[..., Result]) -> None:
    result = pipe("stages", "wrap.rad")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: there is no stage `wrap.rad` (did you mean `wrap.red`? "
        "wrap stages: wrap.blue, wrap.red; or install its package into this environment)\n"
    )


def fails_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Result:
    @click.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli.Commands, "get_command", lambda self, ctx, name: fail)
    return CliRunner().invoke(cli.main, ["fail"])


def test_errors_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    result = fails_with(StageError("the disk is full", hint="make room"), monkeypatch)
    assert result.exit_code == 1
    assert result.stderr == "error: the disk is full (make room)\n"


def test_what_another_user_owns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    file = tmp_path / "run" / "recipe.yaml"
    denied = PermissionError(errno.EACCES, "Permission denied", str(file))
    result = fails_with(denied, monkeypatch)
    how = "chgrp -R and chmod -R g+rX"
    owner = f"{tmp_path} belongs to {tmp_path.owner()}, who can open it with {how}"
    assert result.stderr == f"error: Permission denied: {file} ({owner})\n"
    assert result.exit_code == 2


def test_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    result = fails_with(KeyboardInterrupt(), monkeypatch)
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_a_bug_leaves_its_traceback_in_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("PIPE_DEBUG", raising=False)
    result = fails_with(ZeroDivisionError("by zero"), monkeypatch)
    assert result.exit_code == 1
    (file,) = tmp_path.glob("pipe-*.txt")
    assert result.stderr == (
        f"error: a bug in pipe: ZeroDivisionError: by zero (please report it with {file})\n"
    )
    assert "Traceback" in file.read_text("utf-8")


def test_a_bug_is_raised_for_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPE_DEBUG", "1")
    result = fails_with(ZeroDivisionError("by zero"), monkeypatch)
    assert isinstance(result.exception, ZeroDivisionError)


def test_usage_errors() -> None:
    for args in (["check"], ["nothing"], ["check", "r.yaml", "--nope"]):
        assert CliRunner().invoke(cli.main, args).exit_code == 2


def test_every_command_is_there() -> None:
    for name, (_, summary) in cli.COMMANDS.items():
        result = CliRunner().invoke(cli.main, [name, "-h"])
        assert result.exit_code == 0, result.output
        assert summary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spent:
    """Modules that a command imported, and its processor time (waiting for other processes does not
    count)."""

    seconds: float
    modules: set[str]
    code: int
    output: str


def spend(*args: str) -> Spent:
    program = (
        "import sys\n"
        "from pipeline.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    print(*sys.modules, file=sys.stderr)\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    modules = set(done.stderr.splitlines()[-1].split())
    return Spent(seconds=seconds, modules=modules, code=done.returncode, output=done.stdout)


HEAVY = {"torch", "transformers", "deepspeed", "accelerate", "numpy", "pyarrow"}


def test_help_imports_next_to_nothing() -> None:
    spent = spend("--help")
    assert spent.code == 0
    assert all(name in spent.output for name in cli.COMMANDS)
    assert not spent.modules & {*HEAVY, "yaml", "pydantic", "omegaconf"}
    assert not any(name.startswith("pipeline.commands") for name in spent.modules)


@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("--version",),
        ("stages",),
        ("stages", "train.causal_lm"),
        ("check",),
        ("doctor", "--help"),
    ],
)
def test_commands_are_lean(args: tuple[str, ...], tmp_path: Path) -> None:
    if args == ("check",):
        recipe = tmp_path / "r.yaml"
        recipe.write_text(
            "name: r\nseed: 1\nstages:\n  precision: {use: precision.policy}\n"
            "  again: {use: precision.policy, compute: '${..precision.use}'}\n",
            encoding="utf-8",
        )
        args = ("check", str(recipe), "again.compute=bf16")
    spent = min((spend(*args) for _ in range(3)), key=lambda spent: spent.seconds)
    assert spent.code == 0
    assert not spent.modules & HEAVY
    assert spent.seconds < 0.7


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


def test_every_command_is_under_its_heading() -> None:
    assert len(cli.COMMANDS) == sum(map(len, cli.HEADINGS.values()))
    shown = CliRunner().invoke(cli.main, ["--help"]).output
    for heading, commands in cli.HEADINGS.items():
        section = shown.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in section.splitlines()] == [*commands]


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_options_that_commands_share_have_one_wording(name: str) -> None:
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


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_help_is_in_plain_english(name: str) -> None:
    shown = CliRunner().invoke(cli.main, [name, "--help"]).output
    words = r"behind|besides?|anew|alone|bear|lend|tell of|those of|that of|of its own"
    assert re.findall(rf"(?<!-)\b(?:{words})\b", shown) == []


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
    refused = CliRunner().invoke(cli.main, [typed])
    assert refused.exit_code == 2
    assert refused.stderr.splitlines()[-1] == f"Error: no command is called {typed} ({meant})"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("run w.yaml --output x", "there is no option --output (--run-dir names the folder of a"),
        ("export w --output x", "there is no option --output (--out names what is written)"),
        (
            "check --config w.yaml",
            "there is no option --config (the recipe needs no option",
        ),
        # these commands have nothing that is meant
        ("dag w.yaml --format json", "No such option '--format'."),
        ("check w.yaml --resume", "No such option '--resume'."),
        ("ls --config w.yaml", "No such option '--config'."),
    ],
)
def test_an_option_of_another_program(typed: str, said: str) -> None:
    refused = CliRunner().invoke(cli.main, typed.split())
    assert refused.exit_code == 2
    assert refused.stderr.splitlines()[-1].startswith(f"Error: {said}")
