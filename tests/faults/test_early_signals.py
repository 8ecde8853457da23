"""Signals while a command is still being imported: documented exit codes from the start on."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

import pipetrain
from pipeline.distributed.signals import ENDING
from tests.support.pipe import Outcome, Pipe
from tests.support.tier import FULL, spread

HOOK = """
import os, signal, sys

at, number = os.environ.pop("SIGNAL_AT", ""), int(os.environ.pop("SIGNAL", "0"))
record = os.environ.pop("RECORD", "")

def look(event, arguments):
    if event != "import":
        return
    if record:
        with open(record, "a") as file:
            file.write(arguments[0] + "\\n")
    if arguments[0] == at:
        os.kill(os.getpid(), number)

if at or record:
    sys.addaudithook(look)
"""
"""Sends its own process a signal when that imports a module, or records which it imports."""

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture
def early(pipe: Pipe, tmp_path: Path) -> Pipe:
    """Return `pipe` in processes that send themselves signals."""
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(HOOK)
    pipe.environment["PYTHONPATH"] = os.pathsep.join([str(hooks), pipe.environment["PYTHONPATH"]])
    return pipe


def called(pipe: Pipe, *command: str, **environment: str) -> Outcome:
    return pipe.end(pipe.start("-m", "pipetrain", *command, **environment))


def imported(pipe: Pipe, *command: str) -> list[str]:
    """Return what an undisturbed command imports, from its first own import on."""
    file = pipe.folder / "imported"
    outcome = called(pipe, *command, RECORD=str(file))
    assert outcome.code == 0, outcome.stderr
    names = list(dict.fromkeys(file.read_text().split()))
    return names[names.index("pipeline") :]


def test_a_run_that_is_stopped_while_it_is_imported_ends_as_stopped(early: Pipe) -> None:
    command = ("run", str(early.recipe()), "--run-dir", str(early.run_dir))
    names = imported(early, *command)
    assert len(names) > 100
    for count, name in enumerate(spread(names, 6)):
        number = NUMBERS[count % len(NUMBERS)]
        shutil.rmtree(early.run_dir, ignore_errors=True)
        outcome = called(early, *command, SIGNAL_AT=name, SIGNAL=str(int(number)))
        began = (early.run_dir / "journal.jsonl").exists()
        done = began and early.events()[-1]["event"] == "run finished"
        assert outcome.code == (0 if done else 75), (name, number, outcome)
        said = f"could not be written: {number.name}" if done else f"stopped by {number.name}"
        assert said in outcome.stderr
        assert "Traceback" not in outcome.stderr


MODULES = ("pipeline", "click", "pipeline.cli", "pipeline.utils.activities")


@pytest.mark.parametrize(
    ("command", "code", "modules"),
    [
        (("ls",), 130, MODULES),
        (("resume", "none"), 75, MODULES),
        (("export", "none"), 75, MODULES if FULL else MODULES[2:3]),
    ],
)
def test_ctrl_c_while_a_command_is_imported(
    early: Pipe, command: tuple[str, ...], code: int, modules: tuple[str, ...]
) -> None:
    for module in modules:
        outcome = called(early, *command, SIGNAL_AT=module, SIGNAL=str(int(signal.SIGINT)))
        assert outcome.code == code, (module, outcome)
        assert "Traceback" not in outcome.stderr


def test_what_is_ignored_stays_ignored(early: Pipe) -> None:
    """As under nohup."""
    hook = Path(early.folder, "hooks", "sitecustomize.py")
    hook.write_text(f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{HOOK}")
    outcome = called(early, "ls", SIGNAL_AT="pipeline.cli", SIGNAL=str(int(signal.SIGHUP)))
    assert outcome.code == 0, outcome.stderr


def test_the_signals_are_those_of_a_run() -> None:
    assert set(pipetrain.ENDING) == set(ENDING)
