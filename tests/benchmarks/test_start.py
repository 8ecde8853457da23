"""Measurements of processes by benchmarks/start.py, and the ratios that it concludes from."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import psutil
import pytest
import start
from start_run import Start, measure

PARENT = """
import pathlib, subprocess, sys, time
subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", sys.argv[1]])
time.sleep(0.5)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def test_a_start_is_everything_up_to_the_step_and_leaves_no_process(tmp_path: Path) -> None:
    mark = tmp_path / "stepped"
    command = [sys.executable, "-c", PARENT, str(mark)]
    found = measure([(command, {})], mark.exists, tmp_path)
    assert 0.5 < found.seconds < 60
    assert found.cpu > 0
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in left if line and str(mark) in line]


def test_a_start_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(click.ClickException, match="no such model"):
        measure([(command, {})], lambda: False, tmp_path)


def test_ratios_are_of_one_round_and_their_median_counts() -> None:
    ours = [Start(seconds=s, cpu=2 * s) for s in (11.0, 30.0, 5.0)]
    script = [Start(seconds=s, cpu=s) for s in (10.0, 10.0, 10.0)]
    assert start.seconds_ratio(ours, script) == pytest.approx(1.1)
    cells = start.row("ddp", ours, script)
    assert cells[0] == "ddp"
    assert cells[3] == "1.10 (1.10, 3.00, 0.50)"
    assert cells[6] == "2.20 (2.20, 6.00, 1.00)"
