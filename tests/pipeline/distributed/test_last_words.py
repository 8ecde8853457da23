"""Signals to a process that is about to end."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.chain.plan import plan_file
from pipeline.distributed.signals import Interrupted
from pipeline.errors import RunFailed
from pipeline.execution import rundir
from pipeline.launch.recorded import opened
from tests.pipeline.conftest import TinyRun

FIRST_PART = """
import os, signal, sys
from pipeline.launch.recorded import record_end

def record():
    for name in sys.argv[1:]:
        os.kill(os.getpid(), signal.Signals[name])
        print("goes on after", name, flush=True)

record_end(record)
"""


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
        with rundir.locked(folder), opened(plan, folder):
            shutil.rmtree(folder)
            if error is not None:
                raise error

    with pytest.raises(RunFailed, match="run is gone: it was deleted or moved during"):
        work()
    assert not folder.exists()
