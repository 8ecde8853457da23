"""A disk that fills up during a run: the error, and the resume."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.test_checkpoint_errors import can_mount
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
