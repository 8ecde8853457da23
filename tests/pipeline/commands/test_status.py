"""`pipe status`, `logs`, `report`, `compare` and `ls` on runs that have finished, have failed, and
are under way; and where there is none."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.commands import runs
from tests.pipeline.conftest import TinyRun
from tests.support.pipe import Outcome, Pipe
from tests.support.tiny_project import CHAIN
from tests.support.waiting import becomes


@pytest.fixture
def project(tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the finished run, `runs/tiny` in it, to which the test moves."""
    monkeypatch.chdir(tiny_run.pipe.folder)
    return tiny_run.pipe.folder


@pytest.fixture(scope="module")
def failed(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """Return the folder of a run whose rank 1 has failed."""
    pipe = Pipe(plugin, tmp_path_factory.mktemp("failed"))
    done = pipe.run(pipe.recipe(procs=2, train={"fault": "raise", "rank": 1}))
    assert done.code == 1
    return pipe.run_dir, done


@pytest.fixture
def running(plugin: Path, tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a run whose rank 1 hangs; it is stopped by `stop` in its folder, or when
    the test ends."""
    pipe = Pipe(plugin, tmp_path)
    place = tmp_path / "said"
    place.mkdir()
    recipe = pipe.recipe(procs=2, train={"fault": "hang", "rank": 1})
    started = pipe.fork(place, "run", str(recipe), "--run-dir", str(pipe.run_dir))
    assert becomes((pipe.run_dir / "hanging").exists, 60)
    assert becomes(lambda: "fault.train" in log_of(pipe.run_dir), 20)
    timer = threading.Timer(1.5, started.send, (2,))
    timer.start()
    try:
        yield pipe.run_dir
    finally:
        timer.join()
        assert started.end().code == 75


def log_of(run: Path) -> str:
    return (run / "logs/rank-00000.log").read_text()


def pipe(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_finished_run(project: Path) -> None:
    shown = pipe("status", "runs/tiny")
    assert shown.exit_code == 0
    blank, *lines = [line.rstrip() for line in shown.stdout.splitlines()]
    assert blank == ""
    assert lines[0].split()[:2] == ["tiny", "finished"]
    chain = "  ".join(lines[1:3]).split("  ")
    assert chain == [f"✓ {slot}" for slot in ("track", *CHAIN)]
    labels = [line.split("  ")[0] for line in lines[3:]]
    numbers = ["training", "loss", "held out", "step", "speed", "memory", "saved"]
    assert labels == [*numbers, "report", "talk to it"]
    assert "step 8 of 8" in lines[3]
    assert lines[-2:] == ["report      runs/tiny/report.html", "talk to it  pipe chat runs/tiny"]
    assert pipe("status").stdout.splitlines()[1] == shown.stdout.splitlines()[1]
    assert pipe("status", "--follow").stdout.splitlines()[1] == shown.stdout.splitlines()[1]


def test_as_json(project: Path, tiny_run: TinyRun, failed: tuple[Path, Outcome]) -> None:
    found = json.loads(pipe("status", "--json").stdout)
    assert (found["schema_version"], found["folder"]) == (1, "runs/tiny")
    assert (found["state"], found["slot"], found["activity"]) == ("finished", None, None)
    steps = [record for record in tiny_run.records if "loss" in record]
    assert found["step"] == steps[-1]
    assert (found["evaluation"]["step"], found["checkpoint"]["step"]) == (8, 8)
    assert (found["seconds_left"], found["ended_early"]) == (None, None)
    speed = sum(one["tokens_per_second"] * one["step_seconds"] for one in steps)
    mean = speed / sum(one["step_seconds"] for one in steps)
    assert found["mean_tokens_per_second"] == pytest.approx(mean)
    assert found["measurements"] == {}
    other = json.loads(pipe("status", failed[0], "--json").stdout)
    assert (other["state"], other["step"]) == ("failed", None)


def test_a_failed_run(failed: tuple[Path, Outcome]) -> None:
    folder, _ = failed
    shown = pipe("status", folder)
    assert shown.stdout.split()[:3] == ["the", "run", "failed"]
    assert "✓ declare  ✗ train  · export  · report" in shown.stdout
    assert shown.stdout.splitlines()[-1] == f"continue  pipe resume '{folder}'"
    assert "boom" in pipe("logs", folder, "--rank", "1").stdout
    assert "boom" in (folder / "report.html").read_text()
    listed = json.loads(pipe("ls", folder.parent, "--json").stdout)
    assert [(run["state"], run["slot"]) for run in listed] == [("failed", "train")]


def test_a_run_under_way(running: Path) -> None:
    """Following ends when the run is stopped, 1.5 seconds later."""
    shown = pipe("status", running)
    assert shown.stdout.split()[:3] == ["the", "run", "running"]
    assert "● train 0:0" in shown.stdout
    assert json.loads(pipe("status", running, "--json").stdout)["slot"] == "train"
    before = log_of(running)
    followed = pipe("logs", running, "--follow")
    assert followed.exit_code == 0
    assert followed.stdout.startswith(before)
    assert followed.stdout == log_of(running)
    assert pipe("status", running).stdout.split()[:3] == ["the", "run", "stopped"]


def test_logs(project: Path, tiny_run: TinyRun) -> None:
    whole = log_of(tiny_run.folder)
    assert pipe("logs").stdout == whole
    assert pipe("logs", "-f").stdout == whole
    assert pipe("logs", "runs/tiny", "-n", "2").stdout.splitlines() == whole.splitlines()[-2:]
    assert pipe("logs", "-n", "0").stdout == ""
    other = (tiny_run.folder / "logs/rank-00001.log").read_text()
    assert pipe("logs", "--rank", "1").stdout == other != whole
    missing = pipe("logs", "--rank", "2")
    assert (missing.exit_code, missing.stderr) == (
        2, "run: runs/tiny\nerror: runs/tiny has no log of rank 2 (known here: 0, 1)\n"
    )  # fmt: skip


def test_a_log_with_a_line_that_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LONGEST", 20)
    (tmp_path / "recipe.yaml").touch()
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "rank-00000.log"
    log.write_text(f"first é\n{'x' * 40}\nsecond\n{'y' * 19}\nlast")
    said = pipe("logs", tmp_path)
    assert said.stdout == f"first é\nsecond\n{'y' * 19}\nlast"
    assert said.stderr == "warning: a line of 41 B is left out\n"
    for count, lines in ((0, ""), (1, "last"), (2, f"{'y' * 19}\nlast"), (9, said.stdout)):
        assert pipe("logs", tmp_path, "-n", str(count)).stdout == lines
    log.write_text("first\n" + "x" * 4000)
    assert (pipe("logs", tmp_path).stdout, pipe("logs", tmp_path).stderr) == (
        "first\n", "warning: a line of 4.0 KB is left out\n"
    )  # fmt: skip


def test_reports(project: Path, tmp_path: Path) -> None:
    written = pipe("report", "runs/tiny", "--out", tmp_path / "report.html")
    assert (written.exit_code, written.stdout) == (0, f"{tmp_path / 'report.html'}\n")
    page, own = ((folder / "report.html").read_text() for folder in (tmp_path, Path("runs/tiny")))
    assert page[: page.index("Written by")] == own[: own.index("Written by")]
    blocked = pipe("report", "runs/tiny", "--out", tmp_path / "nowhere/report.html")
    assert (blocked.exit_code, blocked.stdout) == (2, "")
    assert blocked.stderr.startswith("error: No such file or directory")


def test_a_report_of_the_newest_run_and_of_all(project: Path, tmp_path: Path) -> None:
    assert pipe("report").stdout == "runs/tiny/report.html\n"
    written = pipe("report", "runs", "-o", tmp_path / "all.html")
    assert (written.exit_code, written.stdout) == (0, f"{tmp_path / 'all.html'}\n")
    assert ">tiny</a>" in (tmp_path / "all.html").read_text()
    assert not Path("runs/report.html").exists()


@pytest.mark.parametrize("display", ["", ":0"])
def test_a_report_is_opened(
    display: str, project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where there is no display, or no browser, the address is printed."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(opened.append(address)))
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    if display:
        monkeypatch.setenv("DISPLAY", display)
    page = tmp_path / "a page.html"
    shown = pipe("report", "runs/tiny", "--open", "--out", page)
    assert (shown.exit_code, shown.stdout) == (0, f"{page}\n")
    assert shown.stderr == f"no browser can be opened from here: open {page.as_uri()}\n"
    assert opened == ([page.as_uri()] if display else [])


def test_runs_are_compared(project: Path, failed: tuple[Path, Outcome], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree("runs/tiny", other)
    recipe = (other / "recipe.yaml").read_text()
    (other / "recipe.yaml").write_text(recipe.replace("lr: 0.01", "lr: 0.02"))
    shown = pipe("compare", "runs/tiny", other, "--out", tmp_path / "both.html")
    assert shown.exit_code == 0, shown.stderr
    rows = [line.split() for line in shown.stdout.splitlines()]
    (equal,) = [line for line in shown.stdout.splitlines() if line.startswith("the same in all")]
    assert "state finished" in equal
    assert "steps 8" in equal
    at = rows.index(["recipes", "differ", "in", "tiny", "other"])
    assert rows[at + 1 : at + 3] == [["stages.optimizer.lr", "0.01", "0.02"], []]
    assert "environments are the same\n" in shown.stdout
    assert "results are the same\n" in shown.stdout
    assert rows[-1] == ["wrote", str(tmp_path / "both.html")]
    assert "stages.optimizer.lr" in (tmp_path / "both.html").read_text()
    found = json.loads(pipe("compare", "runs/tiny", failed[0], "--json").stdout)
    assert (found["schema_version"], found["runs"]) == (1, ["tiny", "the run"])
    states = {row["name"]: row["values"] for row in found["results"]}
    assert states["state"] == ["finished", "failed"]
    assert states["steps"] == ["8", "-"]
    assert {row["name"]: row["better"] for row in found["results"]}["steps"] == []


TWO_RUNS = "Error: name two runs or more: pipe compare RUN RUN (pipe ls lists them)"
NO_RUN = "error: x is not the folder of a run (pipe run RECIPE starts a run)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status"], "error: there is no run in runs (name the folder of a run)"),
        (["logs", "--follow"], "error: there is no run in runs (name the folder of a run)"),
        (["status", "x"], NO_RUN),
        (["report", "x"], NO_RUN),
        (["compare", "x"], TWO_RUNS),
        (["compare", "x", "y"], NO_RUN),
        (["status", "x", "--follow", "--json"], "Error: --follow excludes --json"),
    ],
)  # fmt: skip
def test_where_there_is_no_run(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = pipe(*arguments)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.splitlines()[-1] == message


def test_a_recipe_whose_variables_are_not_set_here(tmp_path: Path) -> None:
    recipe = "name: a\nstages:\n  model: {use: model.hf, path: '${env:NOT_SET_ANYWHERE}'}\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    shown = pipe("status", tmp_path)
    assert (shown.exit_code, shown.stderr) == (0, "")
    chain, going_on = [line.rstrip() for line in shown.stdout.splitlines()[2:]]
    assert (chain, going_on) == ("· model", f"continue  pipe resume {tmp_path}")
    (tmp_path / "recipe.yaml").write_text("name: [")
    assert pipe("status", tmp_path).exit_code == 2


def test_the_newest_run_is_named_and_taken(project: Path) -> None:
    for command in ("status", "inspect", "report"):
        shown = pipe(command)
        assert (shown.exit_code, shown.stderr) == (0, "run: runs/tiny\n"), shown.output
    # an override in its place is one of the newest run
    refused = pipe("resume", "train.stpes=9", "--dry-run")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("run: runs/tiny\ncommand line, override 1: train.stpes:")
