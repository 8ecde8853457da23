"""Decisions under Ray Train, without Ray: the cause of an attempt's end, and what the next does."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.chain import plan as chain_plan
from pipeline.cli import main
from pipeline.commands.run import _under
from pipeline.errors import RunFailed, UsageError
from pipeline.execution import failures
from pipeline.launch import ray_train
from pipeline.launch.ray_train import _failure, _output, _state, note_failure, phase

START = "of this command"
RECIPE = str(Path(__file__).parents[3] / "recipes" / "quickstart.yaml")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run's folder."""
    (tmp_path / "logs").mkdir()
    return tmp_path


def record(run_dir: Path, rank: int, error: BaseException) -> None:
    failures.record(run_dir, rank, "train", error)


def test_a_lost_worker_is_the_cause_whatever_the_others_raise(run_dir: Path) -> None:
    record(run_dir, 1, RuntimeError("Connection closed by peer"))
    note_failure(run_dir, START, [0, 2])
    error = _failure(run_dir, START)
    assert error is not None
    assert (str(error), error.restart) == ("the workers of ranks 0, 2 were lost", "always")


def test_a_rank_that_died_is_the_cause_though_others_have_raised_before(run_dir: Path) -> None:
    record(run_dir, 1, RuntimeError("Connection closed by peer"))
    record(run_dir, 0, RunFailed("rank 0 was killed by SIGKILL", kind="died", restart="always"))
    note_failure(run_dir, START, [])
    error = _failure(run_dir, START)
    assert error is not None
    assert (str(error), error.restart) == ("rank 0 was killed by SIGKILL", "always")


@pytest.mark.parametrize(
    ("raised", "restart"), [(ValueError("boom"), "after progress"), (UsageError("bad"), "never")]
)
def test_an_error_of_a_rank_says_whether_another_start_may_help(
    run_dir: Path, raised: Exception, restart: str
) -> None:
    record(run_dir, 1, raised)
    note_failure(run_dir, START, [])
    error = _failure(run_dir, START)
    assert error is not None
    assert error.restart == restart
    assert str(error).startswith("rank 1 failed in slot `train`: ")
    assert "pipe resume" not in str(error)


def test_what_a_worker_has_raised_counts_where_no_report_is_seen(run_dir: Path) -> None:
    """As on a network file system, which shows a file of another machine late."""
    stalled = copy.copy(RunFailed("rank 1 stands still", restart="always"))  # as pickle would
    note_failure(run_dir, START, [], [ValueError("a peer is gone"), stalled])
    error = _failure(run_dir, START)
    assert error is not None
    assert (str(error), error.restart) == ("rank 1 stands still", "always")
    note_failure(run_dir, START, [], [UsageError("the folder is not to be seen")])
    error = _failure(run_dir, START)
    assert error is not None
    assert (str(error), error.restart) == ("the folder is not to be seen", "never")


def test_an_attempt_works_until_it_fails_or_is_taken_away(run_dir: Path) -> None:
    def write(**facts: Any) -> None:
        state = {"start": START, "attempt": 1, **facts}
        (run_dir / ray_train.STATE).write_text(json.dumps(state))

    assert phase(run_dir, START) == "waits"
    write()
    assert phase(run_dir, START) == "works"
    write(until=time.time() + 60)
    assert phase(run_dir, START) == "saved"
    write(until=time.time() - 1)
    assert phase(run_dir, START) == "waits"
    write(attempt=2)
    note_failure(run_dir, START, [0])
    assert phase(run_dir, START) == "waits"


def test_prints_reach_a_display_that_reads_them_between_two_writes(run_dir: Path) -> None:
    """More than a pipe holds, as after a command that was suspended."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    seen: list[bytes] = []

    def refresh() -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                seen.append(os.read(reader, 1 << 16))

    screen: Any = SimpleNamespace(output=writer, refresh=refresh)
    with _output(run_dir, screen) as copy_output:
        (run_dir / ray_train.OUTPUT).write_bytes(b"x" * (1 << 20))
        thread = threading.Thread(target=copy_output, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    assert sum(map(len, seen)) == 1 << 20
    os.close(reader)
    os.close(writer)


def test_what_an_earlier_command_has_left_counts_for_nothing(run_dir: Path) -> None:
    assert (_failure(run_dir, START), _state(run_dir, START)) == (None, {})
    note_failure(run_dir, "of another command", [0])
    (run_dir / ray_train.STATE).write_text(json.dumps({"start": "of another", "attempt": 3}))
    assert (_failure(run_dir, START), _state(run_dir, START)) == (None, {})


def test_the_command_sets_engine_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert _under("ray", None, ("a=1",)) == ("a=1", "launch.engine=ray")
    assert _under(None, None, ("a=1",)) == ("a=1",)
    _under("ray", "h:6379", ())
    assert ray_train.os.environ["RAY_ADDRESS"] == "h:6379"


def test_without_ray_nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chain_plan, "find_spec", lambda name: None)
    command = ["run", RECIPE, "--engine", "ray", "--runs", str(tmp_path / "runs")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert "the package ray is not installed (pip install 'pipetrain[ray]')" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_without_ray_train_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import builtins

    real = builtins.__import__

    def missing(name: str, *rest: Any, **options: Any) -> Any:
        if name == "ray":
            raise ImportError("No module named 'ray'", name="ray")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    plan: Any = None
    with (
        pytest.raises(
            UsageError, match=r"engine: ray needs Ray Train .*pip install 'pipetrain\[ray"
        ),
        ray_train._cluster(plan),
    ):
        pass
