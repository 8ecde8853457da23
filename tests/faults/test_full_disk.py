"""A disk that fills up during a run: the error, and the resume."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import in_words
from pipeline.execution.journal import Journal
from tests.faults.test_checkpoint_writers import can_mount
from tests.support.pipe import Pipe

SCRIPT = """
mount -t tmpfs -o size=400k none "$1" && cd "$1" || exit 9
python -m pipetrain run ../recipe.yaml --run-dir "$1/run" > ../1 2>&1; echo $? >> ../codes
python -m pipetrain resume "$1/run" > ../2 2>&1; echo $? >> ../codes
python -m pipetrain ls "$1" > ../ls 2>&1; echo $? >> ../codes
rm "$1/run/fill"; touch "$1/run/repaired"
python -m pipetrain resume "$1/run" > ../3 2>&1; echo $? >> ../codes
cp "$1/run/calls.txt" ..
"""


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces that may mount")
def test_a_disk_that_is_full_in_the_middle_of_a_run(pipe: Pipe, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    pipe.recipe(procs=2, export={"fault": "full"})
    command = ["unshare", "-Urm", "sh", "-c", SCRIPT, "sh", str(disk)]
    path = Path(sys.executable).parent
    subprocess.run(command, check=True, env=pipe.environment | {"PATH": f"{path}:/usr/bin:/bin"})
    said = {name: (tmp_path / name).read_text() for name in ("1", "2", "3", "ls")}
    assert (tmp_path / "codes").read_text().split() == ["1", "1", "0", "0"]
    assert re.search(
        "\nerror: rank [01] failed in slot `export`: No space left on device\n"
        f"  continue with: pipe resume {disk}/run\n$",
        said["1"],
    )
    assert "Traceback" not in "".join(said.values())
    assert said["2"].startswith(f"error: No space left on device: {disk}/run/")
    assert "failed" in said["ls"] or "stopped" in said["ls"]
    calls = (tmp_path / "calls.txt").read_text().split()
    assert calls.count("train") == 1  # finished stages are not run again
    assert calls.count("export") == 2


CHATTY = """
mount -t tmpfs -o size=400k none "$1" && cd "$1" || exit 9
python -m pipetrain run ../recipe.yaml --run-dir "$1/run" > ../1 2> ../2; echo $? > ../codes
cp run/logs/* ..
"""


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces that may mount")
@pytest.mark.parametrize("stays", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_log_that_its_disk_does_not_take(pipe: Pipe, tmp_path: Path, stays: bool) -> None:
    """A rank says so once, instead of two stacks for each line; where there is room again, nothing
    has failed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    pipe.recipe(procs=2, export={"fault": "chatty"})
    command = ["unshare", "-Urm", "sh", "-c", CHATTY, "sh", str(disk)]
    path = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "STAYS_FULL": str(int(stays))}
    subprocess.run(command, check=True, env=pipe.environment | path)
    said, code = (tmp_path / "2").read_text(), (tmp_path / "codes").read_text().strip()
    logs = [f"{disk}/run/logs/rank-0000{rank}.log" for rank in range(2)]
    told = [f"{log} lacks lines from here on: No space left on device" for log in logs]
    lines = said.splitlines()
    assert sorted(line for line in lines if "lacks lines" in line) == told, said
    assert "Logging error" not in said
    assert "Traceback" not in said
    assert code == ("1" if stays else "0"), said
    assert len(lines) <= (7 if stays else 2), said
    if not stays:  # what comes when there is room again is kept
        assert "report: fault.report" in (tmp_path / "rank-00000.log").read_text()


def test_a_journal_that_its_disk_does_not_take(tmp_path: Path) -> None:
    """The error names the file, and the next line is written when there is room again."""
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("run started")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "journal.jsonl").stat().st_size + 9, -1))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            journal.write("slot started", slot="train")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert in_words(caught.value) == f"File too large: {tmp_path}/journal.jsonl"
    journal.write("run finished")
    assert [event["event"] for event in journal.events()] == ["run started", "run finished"]
