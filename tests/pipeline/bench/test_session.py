"""One run of a benchmark, and a whole real benchmark."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline import cli
from pipeline.bench import session as measuring
from pipeline.bench.trials import BenchLength, TrialRecipe
from pipeline.chain.plan import make_plan
from pipeline.chain.registry import Registry
from pipeline.planning.forecast import BACKWARD, LOAD, RESUME, SAVE, Held
from pipeline.recipe import load_recipe
from tests.support.pipe import REPOSITORY


def test_a_recipe_that_is_wrong_under_a_strategy_is_a_row(
    real: dict[str, Any], tmp_path: Path
) -> None:
    recipe = "name: x\nstages: {wrap: {use: wrap.zeero}}\n"
    session = measuring.Benchmark(
        plan=make_plan(load_recipe("r.yaml")), threads=None, minutes=1, keep=False,
        length=BenchLength(steps=1, warmup=0, weak=False), folder=tmp_path / "b",
        trials=[TrialRecipe(strategy="s", use="wrap.zero", procs=2, text=recipe)],
        registry=Registry.installed(),
    )  # fmt: skip
    (done,), _ = session.run(lambda rows: None)
    assert done.error.startswith("wrap.use: there is no stage `wrap.zeero` (did you mean")


def called(arguments: list[str], seconds: float) -> int | None:
    with Path("output.txt").open("wb") as output:
        return measuring._call(arguments, output.fileno(), seconds)


@pytest.mark.parametrize(
    ("line", "seconds", "code"),
    [("exec sleep 600", 0.5, None), ("setsid sleep 600 & echo $! > pid", 60, 0)],
    ids=["a run that never ends", "a run that leaves something"],
)
def test_nothing_outlives_a_run(
    line: str, seconds: float, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = Path("script")
    script.write_text(f"#!/bin/sh\n{line}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script.absolute()))
    assert called(["check", "r.yaml"], seconds) == code
    if code == 0:
        with pytest.raises(ProcessLookupError):
            os.kill(int(Path("pid").read_text()), 0)


KILLED = """
import sys
from types import SimpleNamespace
from pipeline.bench import session
session.sys = SimpleNamespace(executable=sys.argv[1])
session._call([], 1, 600)
"""


def test_a_run_ends_with_its_benchmark_and_so_does_what_it_has_started(tmp_path: Path) -> None:
    script, pids = tmp_path / "script", tmp_path / "pids"
    script.write_text(f"#!/bin/sh\nsetsid sleep 600 & echo $! $$ > {pids}\nexec sleep 600\n")
    script.chmod(0o700)
    benchmark = subprocess.Popen([sys.executable, "-c", KILLED, str(script)])
    while not (pids.exists() and pids.read_text().endswith("\n")):
        time.sleep(0.05)
    benchmark.kill()
    benchmark.wait()
    left = [Path("/proc", pid) for pid in pids.read_text().split()]
    deadline = time.monotonic() + 20
    while any(one.exists() for one in left) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(one.exists() for one in left)


def test_files_of_the_user_stand_in_for_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    Path("click.py").write_text("raise SystemExit(9)")
    assert called(["stages", "train.causal_lm"], 60) == 0


def test_memory_is_predicted_for_what_is_measured(
    real: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {LOAD: 5, BACKWARD: 7, SAVE: 9, RESUME: 11}
    peaks = {phase: Held(bytes=held[phase], items={}) for phase in held}
    told = SimpleNamespace(estimate=SimpleNamespace(device=peaks))
    monkeypatch.setattr(measuring, "estimate_plan", lambda *_: told)
    assert measuring._predicted(make_plan(load_recipe("r.yaml"))) == 7


def test_a_run_that_is_killed_says_so(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    output.write_text("step 3\n")
    reason = measuring._reason(tmp_path, output, -signal.SIGKILL)
    assert reason.startswith("the run was killed by SIGKILL (the system does this when memory")
    assert measuring._reason(tmp_path, output, 1) == "step 3"


@pytest.mark.full
def test_a_real_benchmark(real: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    strategies = ["ddp", "fsdp"]
    options = ["--procs", "1,2", "--steps", "2", "--warmup", "1", "--json", "--run-dir", "here"]
    command = ["bench", "r.yaml", "--strategies", ",".join(strategies), *options]
    result = CliRunner().invoke(cli.main, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    rows = {(r["strategy"], r["procs"]): r for r in told["rows"]}
    assert list(rows) == [(strategy, procs) for strategy in strategies for procs in (1, 2)]
    assert all(r["error"] is None for r in rows.values())
    for (strategy, procs), one in rows.items():
        assert one["tokens_per_step"] == pytest.approx(8 * 16)
        assert one["samples_per_step"] == 8
        speed = one["tokens_per_second"]
        assert 0 < speed["low"] <= speed["median"] <= speed["high"]
        base = rows[strategy, 1]["tokens_per_second"]["median"]
        assert one["efficiency"] == pytest.approx(speed["median"] / procs / base)
        assert one["memory"]["kind"] == "host"
        assert one["memory"]["measured"] > 0
        assert one["memory"]["predicted"] > 0
        assert one["memory"]["ratio"] is None
        assert one["first_step_seconds"] > one["step_seconds"]["low"]
        assert one["checkpoint_seconds"] > 0
        assert one["checkpoint_stall_seconds"] > 0
        assert 0 <= one["data_wait_share"] <= 1
        assert 0 <= one["communication_share"] <= 1
    assert all(rows[strategy, 1]["efficiency"] == 1 for strategy in strategies)
    assert rows["fsdp", 2]["communication_share"] > 0
    assert not Path("here/trials").exists()
