"""The record of a command: its end, and that it leaves the run as it was when it did nothing."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.chain.plan import plan_file
from pipeline.contracts.metrics import Metrics
from pipeline.distributed.signals import Interrupted
from pipeline.errors import ResumeRefused, RunFailed
from pipeline.execution import failures, rundir
from pipeline.execution.journal import Journal, command_begins
from pipeline.launch import job
from tests.pipeline.conftest import TinyRun

FIRST_PART = """
import os, signal, sys
from pipeline.launch.job import record_end

def record():
    for name in sys.argv[1:]:
        os.kill(os.getpid(), signal.Signals[name])
        print("goes on after", name, flush=True)

record_end(record)
"""


@pytest.fixture
def again(tmp_path: Path) -> Journal:
    """The journal of a run that was resumed, with other settings, and has failed."""
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("run started", procs=1)
    journal.write("run finished")
    journal.write("slot set aside", slot="export")
    journal.write("run started", procs=1, changed=True)
    journal.write("slot started", slot="model", use="model.a")
    journal.write("slot finished", slot="model", use="model.a", digest="d", record=None)
    journal.write("slot started", slot="train", use="train.a")
    return journal


def test_events_of_an_undone_command_do_not_count(again: Journal) -> None:
    again.write("run failed", problem="no", restarting=True)
    again.write("run started", procs=1, restart=1)
    assert job.is_to_be_undone(again.path.parent)
    again.write("run failed", problem="no", undone=True)
    assert [one["event"] for one in again.state().events] == ["run started", "run finished"]
    assert again.state().ended_well
    assert again.state().finished == {}
    newest = [event["event"] for event in again.events()[command_begins(again.events()) :]]
    assert newest[:2] == ["slot set aside", "run started"]


@pytest.mark.parametrize("record", [{"loss": 1.0}, {"checkpoint_stall_seconds": 0.1}])
def test_a_step_and_a_checkpoint_stay(again: Journal, record: dict[str, float]) -> None:
    folder = again.path.parent
    metrics, now = Metrics(folder / "metrics.jsonl"), again.events()[-1]["time"]
    metrics.write_training({"step": 1, "time": now - 60, **record})
    metrics.write_training({"step": 1, "time": now + 1, "eval_loss": 1.0})
    assert job.is_to_be_undone(folder)
    metrics.write_training({"step": 2, "time": now + 2, **record})
    assert not job.is_to_be_undone(folder)


def test_a_durable_result_stays(again: Journal) -> None:
    again.write("slot finished", slot="train", use="train.a", digest="d", record={"file": "a"})
    assert not job.is_to_be_undone(again.path.parent)


def test_a_failure_under_the_same_settings_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("run started", procs=1)
    assert not job.is_to_be_undone(tmp_path)
    journal.write("run failed", problem="no")
    journal.write("run started", procs=1, changed=False)
    assert not job.is_to_be_undone(tmp_path)
    failures.record(tmp_path, 0, "train", ResumeRefused("other data"))
    assert job.is_to_be_undone(tmp_path)  # who refuses has done nothing, whatever has changed


def test_settings_are_put_back_whatever_they_hold(tmp_path: Path) -> None:
    kept, *others = job.SETTINGS
    (tmp_path / kept).write_bytes(b"name: r\r\n\xff")
    (tmp_path / others[0]).write_bytes(b"")
    before = job.settings_in(tmp_path)
    for name in job.SETTINGS:
        (tmp_path / name).write_text("of the command that fails")
    job.put_back(tmp_path, before)
    assert (tmp_path / kept).read_bytes() == b"name: r\r\n\xff"
    assert (tmp_path / others[0]).read_bytes() == b""
    assert not any((tmp_path / name).exists() for name in others[1:])


@pytest.mark.parametrize(
    ("sent", "code", "went_on"),
    [
        (["SIGINT"], 0, 1),
        (["SIGINT", "SIGINT"], -signal.SIGINT, 1),
        (["SIGTERM", "SIGINT", "SIGTERM", "SIGINT"], -signal.SIGINT, 3),
        (["SIGTERM", "SIGTERM", "SIGTERM"], 0, 3),
    ],
)
def test_a_second_interrupt_ends_what_must_be_done(
    sent: list[str], code: int, went_on: int
) -> None:
    """As everywhere; a single one, and any other signal, does not."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_PART, *sent], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.count("goes on")) == (code, went_on), done.stderr


@pytest.mark.parametrize("error", [None, FileNotFoundError("metrics.jsonl"), Interrupted(15)])
def test_a_folder_that_is_gone_at_the_end(
    tiny_run: TinyRun, tmp_path: Path, error: BaseException | None
) -> None:
    plan = plan_file(tiny_run.recipe)
    folder = tmp_path / "run"
    folder.mkdir()

    def work() -> None:
        with rundir.locked(folder), job.recorded_start_and_end(plan, folder):
            shutil.rmtree(folder)
            if error is not None:
                raise error

    with pytest.raises(RunFailed, match="run is gone: it was deleted or moved during"):
        work()
    assert not folder.exists()


def test_a_recipe_that_was_damaged_meanwhile_hides_no_good_end(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_file(tiny_run.recipe)
    with rundir.locked(tmp_path), job.recorded_start_and_end(plan, tmp_path):
        (tmp_path / rundir.RECIPE).write_text("{")
    assert "run folder" in capsys.readouterr().out
