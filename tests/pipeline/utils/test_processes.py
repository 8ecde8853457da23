"""Child processes and their descendants."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from pipeline.utils.processes import GRACE, kill_descendants


def started_in_a_session(script: str, file: Path) -> None:
    """Have a process in its own session start a shell that writes to the file, and die."""
    process = subprocess.Popen(["bash", "-c", script], start_new_session=True)
    while not (file.exists() and file.read_text().endswith("\n")):
        time.sleep(0.01)
    process.kill()
    process.wait()


def test_no_descendant_is_left(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with kill_descendants():
        started_in_a_session(f"sleep 600 & echo $! > {file}; wait", file)
        pid = int(file.read_text())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("grace", "takes", "expected"), [(60, 1, "begun\nended\n"), (1, 60, "begun\n")]
)
def test_a_descendant_with_grace_gets_its_time(
    tmp_path: Path, grace: int, takes: int, expected: str
) -> None:
    file, looks = tmp_path / "said", []
    script = f"echo begun; sleep {takes}; echo ended"
    with kill_descendants(lambda: looks.append(1)):
        started_in_a_session(f"bash -c '{script}' x {GRACE}{grace} > {file} & wait", file)
    assert file.read_text() == expected
    assert looks
