"""`pipe bench`: comparing short runs."""

from __future__ import annotations

import errno
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from pipeline.bench import report
from pipeline.bench import session as measuring
from pipeline.distributed.signals import Interrupted
from pipeline.execution.journal import Journal

Bench = Callable[..., Result]


def test_a_run_that_fails_is_a_row(bench: Bench) -> None:
    result = bench("--strategies", "red1,blue", "--procs", "2,1,01,2", "--json",
                   "--run-dir", "here")  # fmt: skip
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told == json.loads(Path("here/bench.json").read_text())
    assert told["schema_version"] == 1
    wrong = "rank 0 failed in slot `train`: out of memory"
    assert [(r["strategy"], r["procs"], r["efficiency"], r["error"]) for r in told["rows"]] == [
        ("red1", 1, None, wrong), ("red1", 2, None, wrong), ("blue", 1, 1.0, None),
        ("blue", 2, 0.75, None),
    ]  # fmt: skip
    failed, *_, ran = told["rows"]
    assert list(failed) == list(ran)
    known = {"strategy", "use", "procs", "error"}
    assert {name for name, value in failed.items() if value is not None} == known
    assert told["verdict"][-1] == f"did not run: red1 on 2 processes: {wrong}"
    # files that explain a failure stay
    left = sorted(path.name for path in Path("here/trials").iterdir())
    assert left == ["red1-1", "red1-2"]
    kept = (str(path.relative_to("here/trials")) for path in Path("here").rglob("red1-1/**/*"))
    assert sorted(kept) == [
        "red1-1/output.txt",
        "red1-1/run",
        "red1-1/run/journal.jsonl",
        "red1-1/run/logs",
        "red1-1/trial.yaml",
    ]
    assert "blue on 2 processes" in result.stderr


def test_an_interrupt_keeps_the_rows_before_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, saved = measuring._call, []

    def interrupted_at_the_third(arguments: list[str], *rest: Any) -> int:
        file = Path("here/bench.json")
        saved.append(len(json.loads(file.read_text())["rows"]) if file.exists() else 0)
        if len(saved) == 3:
            raise Interrupted(signal.SIGINT)
        return call(arguments, *rest)

    monkeypatch.setattr(measuring, "_call", interrupted_at_the_third)
    result = bench("--strategies", "blue", "--procs", "1,2,3,4", "--run-dir", "here")
    assert result.exit_code == 130
    assert saved == [0, 1, 2]
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("blue  ")] == [
        ["blue", "1"], ["blue", "2"],
    ]  # fmt: skip
    missing = ["blue on 3 processes", "blue on 4 processes"]
    assert f"stopped by SIGINT before the end of {', '.join(missing)}" in lines
    assert result.stderr.endswith("stopped by SIGINT\n")
    told = json.loads(Path("here/bench.json").read_text())
    assert told["missing"] == missing
    assert [row["efficiency"] for row in told["rows"]] == [1.0, 0.75]


def test_an_interrupt_before_any_row(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> int:
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(measuring, "_call", interrupted)
    result = bench("--run-dir", "here")
    assert (result.exit_code, result.stdout) == (143, "")


def test_rows_are_told_where_the_files_cannot_be_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "bench.json")

    monkeypatch.setattr(report, "replace_text", full)
    monkeypatch.setattr(report, "draw", full)
    result = bench("--strategies", "blue", "--procs", "1,2")
    assert result.exit_code == 1
    assert "blue          2        48" in result.stdout
    problem = "No space left on device: bench.json"
    assert result.stderr.count(f"  bench.json cannot be written: {problem}\n") == 2
    assert f"no bench.svg: {problem}\n" in result.stderr
    assert result.stderr.endswith(f"error: {problem}\n")


def test_the_table_is_printed_before_the_picture(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "draw", interrupted)
    result = bench("--strategies", "blue", "--run-dir", "here")
    assert result.exit_code == 130
    assert "fastest that fits: blue on 2 processes, 48 tokens/s" in result.stdout
    assert json.loads(Path("here/bench.json").read_text())["rows"][0]["procs"] == 2


@pytest.mark.parametrize(
    ("option", "folder"), [("--run-dir", "a.txt/x"), ("--runs", "a.txt"), ("--run-dir", "/proc")]
)
def test_a_folder_that_cannot_be_written_is_found_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, option: str, folder: str
) -> None:
    monkeypatch.setattr(measuring, "_call", None)  # not called
    result = bench(option, folder)
    assert (result.exit_code, result.stdout) == (2, "")
    line = result.stderr.splitlines()[-1]
    assert line.lower().startswith("error: ")
    assert folder in line


def test_a_run_that_takes_too_long_is_a_row(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    call = measuring._call

    def late(arguments: list[str], output: int, seconds: float) -> int | None:
        if "red1" not in arguments[1]:
            return call(arguments, output, seconds)
        assert seconds == 120
        journal = Path(arguments[3], "journal.jsonl")
        journal.parent.mkdir()
        Journal(journal).write("slot started", slot="train")
        return None

    monkeypatch.setattr(measuring, "_call", late)
    result = bench("--strategies", "red1,blue", "--timeout", "2")
    assert result.exit_code == 0
    problem = "ended after 2 min in slot `train` (--timeout allows more)"
    assert f"red1          2  {problem}\n" in result.stdout
    assert "fastest that fits: blue on 2 processes, 48 tokens/s" in result.stdout


def test_all_runs_fail(bench: Bench) -> None:
    result = bench("--run-dir", "here")  # the recipe's own wrap slot, and its two processes
    assert result.exit_code == 1
    assert "wrap.red      2  rank 0 failed in slot `train`: out of memory" in result.stdout
    assert "nothing ran to its end" in result.stdout


def test_what_a_screen_shows(bench: Bench) -> None:
    result = bench("--strategies", "blue", "--procs", "1,2", "--steps", "3", "--keep",
                   "--runs", "there")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert not Path("runs").exists()
    (folder,) = Path("there").glob("bench-small-*")
    assert (folder / "bench.json").is_file()
    lines = result.stdout.strip().splitlines()
    assert lines[:2] == [
        "small on cpu: median of 3 steps after 2; the global batch stays (8 samples a step)",
        "efficiency: tokens/s of a process, relative to the strategy's own run on 1 process",
    ]
    assert "blue, from 1 to 2 processes: 1.50 times as fast; 75% of the ideal 2 (+- 0%)" in lines
    assert sorted(path.name for path in (folder / "trials").iterdir()) == ["blue-1", "blue-2"]
    assert len(yaml.safe_load((folder / "trials/blue-1/trial.yaml").read_text())["stages"]) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "blu"], "error: there is no strategy `blu` (did you mean `blue`?"),
        (["--strategies", "blue,,red1"], "error: --strategies blue,,red1: an empty entry"),
        (
            ["--procs", "1,two"],
            "error: --procs: `two` is not a number of processes (such as 1,2,4)",
        ),
        (["--procs", "0"], "error: --procs: `0` is not a number of processes"),
        (["--procs", "1,-2"], "error: --procs: `-2` is not a number of processes"),
        (["--procs", ""], "error: --procs : an empty entry"),
        (
            ["--strategies", "blue", "wrap.stage=1"],
            "error: `wrap.stage=1` has no effect: --strategies replaces the slot `wrap` (leave out",
        ),
        (["--steps", "0"], "0 is not in the range x>=1"),
        (["--run-dir", "."], "error: . already holds a benchmark"),
        (["wrap.stage=9"], "wrap.stage: must be `1`, `2` or `3`, not `9`"),
    ],
)
def test_wrong_usage(bench: Bench, arguments: list[str], message: str) -> None:
    Path("bench.json").touch()
    result = bench(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_it_starts_its_own_processes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0" if "RANK" in name else "1")
    result = bench()
    assert result.exit_code == 2
    assert "run it without torchrun's variables" in result.stderr
