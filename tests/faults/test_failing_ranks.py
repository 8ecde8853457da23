"""A failing rank ends the run, its error comes last, and nothing is left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.pipe import Pipe
from tests.support.tier import spread

DIED = {
    "segv": "rank 1 was killed by SIGSEGV",
    "kill": "rank 1 was killed by SIGKILL (the system does this when memory runs out)",
    "exit": "rank 1 ended by itself with exit code 3",
    "exit0": "rank 1 ended by itself with exit code 0",
}


def test_a_raising_rank(pipe: Pipe) -> None:
    """It has started a process that knows nothing of the run; the `pipe` fixture looks for it."""
    result = pipe.run(pipe.recipe(procs=2, train={"fault": "child", "rank": 1}))
    assert result.code == 1
    lines = result.stderr.splitlines()
    assert lines[-4] == "error: rank 1 failed in slot `train`: ValueError: boom"
    assert lines[-3].startswith("  at ")
    assert lines[-3].endswith(" in misbehave")
    assert lines[-2] == f"  traceback: {pipe.run_dir}/failures/rank-00001.txt"
    assert lines[-1] == f"  continue with: pipe resume '{pipe.run_dir}'"
    assert len(lines) == 4
    trace = (pipe.run_dir / "failures" / "rank-00001.txt").read_text()
    assert trace.endswith("ValueError: boom\n")
    log = (pipe.run_dir / "logs" / "rank-00001.log").read_text()
    assert "raw output of rank 1" in log
    assert "ValueError: boom" in log
    assert "raw output of rank 0" in result.stdout
    assert "rank 1" not in result.stdout
    started, failed = pipe.events()[-2:]
    assert (started["event"], failed["event"]) == ("slot started", "run failed")
    # rank 0 was waiting for rank 1 when it was stopped
    assert failed["time"] - started["time"] < 15


@pytest.mark.parametrize("fault", ["vanish", "vanish and raise", "vanish and write"])
def test_a_run_folder_that_is_deleted_meanwhile(pipe: Pipe, fault: str) -> None:
    """No other start is made in vain, nothing is made anew, and no resume is advised."""
    recipe = pipe.recipe(train={"fault": fault}, launch={"restarts": {"limit": 3}})
    result = pipe.run(recipe)
    assert result.code == 1, result.stderr
    (said,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert said.startswith(f"error: {pipe.run_dir} is gone: it was deleted or moved during the run")
    assert "starting again" not in result.stderr
    assert "pipe resume" not in result.stderr
    assert ("Traceback" in result.stderr) == (fault == "vanish and raise")  # an error of its own
    assert "metrics.jsonl" not in result.stderr
    assert not pipe.run_dir.exists()


@pytest.mark.parametrize("fault", spread([*DIED], 2))
def test_a_dying_rank(pipe: Pipe, fault: str) -> None:
    recipe = pipe.recipe(procs=2, train={"fault": fault, "rank": 1, "peers": "collective"})
    result = pipe.run(recipe)
    assert result.code == 1
    assert result.stderr.splitlines()[-3:] == [
        f"error: {DIED[fault]} in slot `train`",
        f"  log: {pipe.run_dir}/logs/rank-00001.log",
        f"  continue with: pipe resume '{pipe.run_dir}'",
    ]
    if fault == "segv":
        assert "in misbehave" in (pipe.run_dir / "logs" / "rank-00001.log").read_text()


def test_an_expected_error_shows_its_message_only(pipe: Pipe) -> None:
    recipe = pipe.recipe(procs=1, train={"fault": "expected"})
    result = pipe.run(recipe)
    assert result.code == 1
    assert result.stderr.splitlines() == [
        "error: rank 0 failed in slot `train`: corpus.jsonl:7: no text (give it some)",
        f"  after the change: pipe resume '{pipe.run_dir}'",
    ]


def test_a_stage_that_exits_has_not_finished(pipe: Pipe) -> None:
    result = pipe.run(pipe.recipe(procs=2, train={"fault": "sys_exit"}))
    assert result.code == 1
    assert "error: rank 0 failed in slot `train`: SystemExit: 0\n" in result.stderr


def test_a_failing_clean_up_is_a_failure(pipe: Pipe) -> None:
    result = pipe.run(pipe.recipe(procs=1, train={"fault": "cleanup"}))
    assert result.code == 1
    assert "error: rank 0 failed in slot `report`: ValueError: boom\n" in result.stderr


def test_a_rank_that_cannot_start(pipe: Pipe) -> None:
    command = ("-m", "pipetrain", "run", str(pipe.recipe(procs=2)), "--run-dir", str(pipe.run_dir))
    result = pipe.end(pipe.start(*command, FAULTY_IMPORT="1"))
    assert result.code == 1
    first = result.stderr.splitlines()[0]
    assert first.startswith("error: rank 1 failed before the first slot: ")
    assert "ImportError: this rank lacks a library" in first


def test_the_others_do_not_wait_for_a_main_that_raised(pipe: Pipe) -> None:
    result = pipe.run(pipe.recipe(procs=2, train={"fault": "main_first"}))
    assert result.code == 1
    assert result.stderr.startswith(
        "error: rank 0 failed in slot `train`: ValueError: rank 0 is first\n"
    )


@pytest.mark.parametrize(
    ("procs", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM), (2, signal.SIGUSR1)]
)
def test_a_signal_stops_the_run(
    pipe: Pipe, tmp_path: Path, procs: int, number: signal.Signals
) -> None:
    recipe = pipe.recipe(procs=procs, train={"fault": "hang"})
    process = pipe.fork(tmp_path, "run", str(recipe), "--run-dir", str(pipe.run_dir))
    pipe.wait_for((pipe.run_dir / "hanging").exists)
    process.send(number)
    result = process.end()
    assert result.code == 75
    assert result.seconds < 60
    assert result.stderr.splitlines() == [
        f"stopped by {number.name}",
        f"  continue with: pipe resume '{pipe.run_dir}'",
    ]
    last = pipe.events()[-1]
    assert (last["event"], last["problem"]) == ("run stopped", number.name)


def test_a_signal_to_one_rank_stops_the_run(pipe: Pipe) -> None:
    result = pipe.run(pipe.recipe(procs=2, train={"fault": "term", "rank": 1}))
    assert result.code == 75
    assert result.stderr.splitlines()[0] == "stopped by SIGTERM"


def test_ranks_die_with_a_killed_launcher_and_the_run_can_be_resumed(
    pipe: Pipe, tmp_path: Path
) -> None:
    """Nor is a temporary folder left."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    recipe = pipe.recipe(procs=2, train={"fault": "hang"})
    command = ("-m", "pipetrain", "run", str(recipe), "--run-dir", str(pipe.run_dir))
    process = pipe.start(*command, TMPDIR=str(scratch))
    pipe.wait_for((pipe.run_dir / "hanging").exists)
    other = pipe("resume", str(pipe.run_dir))
    assert other.code == 2
    assert f"is in use by process {process.pid} on " in other.stderr
    process.kill()
    pipe.end(process)
    pipe.wait_for(lambda: not pipe.processes(), limit=5)
    assert list(scratch.iterdir()) == []
    result = pipe("resume", str(pipe.run_dir), "train.fault=none")
    assert result.code == 0, result.stderr
    assert pipe.events()[-1]["event"] == "run finished"
