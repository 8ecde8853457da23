"""Signals, children, threads, and what cannot be started here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.errors import RecipeError
from pipeline.launch.children import none_left
from pipeline.launch.local import _many, _set_threads
from pipeline.launch.signals import Interrupted, default_signals, interruptible
from pipeline.plan import make_plan
from pipeline.recipe import load_recipe
from pipeline.registry import Registry
from tests.support.pipe import REPOSITORY

STUCK = """
import ctypes, os, signal, threading
from pipeline.launch.signals import interruptible
with interruptible(force_after=0.3):
    print("ready", flush=True)
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)  # never returns, whatever signal comes
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_ending_signal_raises_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    seen = []
    with interruptible(force_after=60):
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except Interrupted as interrupted:
            seen.append(interrupted.number)
        os.kill(os.getpid(), signal.SIGTERM)  # ignored while things are wound up
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert seen == [number]
    assert signal.getsignal(number) == before


def test_a_process_stuck_in_a_native_call_ends_all_the_same() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.3)  # until it is in the call
    process.terminate()
    code = process.wait(10)
    process.stdout.close()
    assert code == 143


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible(force_after=60):
            os.kill(os.getpid(), signal.SIGHUP)
        default_signals()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_rank_whose_launcher_is_dead_already_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline.worker", str(tmp_path), "1"]
    assert subprocess.run(command, check=False).returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_files_of_the_user_stand_in_for_no_module_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command: list[str] = []

    def elastic(config: object, python: str) -> Callable[..., None]:
        return lambda *arguments: command.extend([python, *arguments])

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", elastic)
    _many(2, tmp_path / "no run", ())
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    (tmp_path / "random.py").write_text("raise SystemExit(9)")
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 1


def test_no_descendant_is_left(tmp_path: Path) -> None:
    """A process in a session of its own starts another and dies."""
    file = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {file}; wait"
    with none_left():
        process = subprocess.Popen(["bash", "-c", script], start_new_session=True)
        while not (file.exists() and file.read_text().endswith("\n")):
            time.sleep(0.01)
        process.kill()
        process.wait()
        pid = int(file.read_text())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("asked", "set_before", "expected"), [(None, None, 3), (None, "7", 7), (2, "7", 2)]
)
def test_threads(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, set_before: str | None, expected: int
) -> None:
    monkeypatch.setattr("pipeline.machine.usable_cores", lambda: 7.5)
    monkeypatch.setenv("OMP_NUM_THREADS", set_before or "")
    if set_before is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    launch = SimpleNamespace(threads=asked)
    plan = SimpleNamespace(recipe=SimpleNamespace(launch=launch), view=SimpleNamespace(procs=2))
    _set_threads(plan)  # type: ignore[arg-type]
    assert os.environ["OMP_NUM_THREADS"] == str(expected)


def test_more_processes_than_gpus_need_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.plan.gpu_count", lambda: 8)
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\nlaunch: {device: cuda, procs: 16}\nstages: {}\n")
    recipe = load_recipe(path)
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe, registry=Registry([]), here=True)
    problem = next(p for p in caught.value.problems if p.key == "launch.procs")
    assert problem.message == "16 processes, but this machine has 8 GPUs"
    assert "start it on every node: torchrun --nnodes" in problem.hint
    assert str(problem.location) == f"{path}:2:31"
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe, registry=Registry([]), here=True, procs=16)
    assert [p.key for p in caught.value.problems] == ["stages"]
