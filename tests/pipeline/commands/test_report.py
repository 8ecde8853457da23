"""`pipe report`, `pipe compare` and `pipe track`, of runs that have ended."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from pipeline import api, cli
from pipeline.execution import clean, rundir
from pipeline.utils.files import replace_text
from tests.pipeline.conftest import TinyRun
from tests.pipeline.view.folders import add, made, step
from tests.support.tiny_project import tiny_project


def called(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.main, [*map(str, arguments)])


def test_reports(finished: TinyRun, tmp_path: Path) -> None:
    written = called("report", "runs/tiny", "--out", tmp_path / "report.html")
    assert (written.exit_code, written.stdout) == (0, f"{tmp_path / 'report.html'}\n")
    page, own = ((folder / "report.html").read_text() for folder in (tmp_path, Path("runs/tiny")))
    assert page[: page.index("Written by")] == own[: own.index("Written by")]
    blocked = called("report", "runs/tiny", "--out", tmp_path / "nowhere/report.html")
    assert (blocked.exit_code, blocked.stdout) == (2, "")
    assert blocked.stderr.startswith("error: No such file or directory")


def test_a_report_of_the_newest_run_and_of_all(finished: TinyRun, tmp_path: Path) -> None:
    assert called("report").stdout == "runs/tiny/report.html\n"
    written = called("report", "runs", "-o", tmp_path / "all.html")
    assert (written.exit_code, written.stdout) == (0, f"{tmp_path / 'all.html'}\n")
    assert ">tiny</a>" in (tmp_path / "all.html").read_text()
    assert not Path("runs/report.html").exists()


@pytest.mark.parametrize("display", ["", ":0"])
def test_a_report_is_opened(
    display: str, finished: TinyRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where there is no display, or no browser, the address is printed."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(opened.append(address)))
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    if display:
        monkeypatch.setenv("DISPLAY", display)
    page = tmp_path / "a page.html"
    shown = called("report", "runs/tiny", "--open", "--out", page)
    assert (shown.exit_code, shown.stdout) == (0, f"{page}\n")
    assert shown.stderr == f"no browser can be opened from here: open {page.as_uri()}\n"
    assert opened == ([page.as_uri()] if display else [])


def test_runs_are_compared(finished: TinyRun, failed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree("runs/tiny", other)
    recipe = (other / "recipe.yaml").read_text()
    (other / "recipe.yaml").write_text(recipe.replace("lr: 0.01", "lr: 0.02"))
    shown = called("compare", "runs/tiny", other, "--out", tmp_path / "both.html")
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
    found = json.loads(called("compare", "runs/tiny", failed, "--json").stdout)
    assert (found["schema_version"], found["runs"]) == (1, ["tiny", "the run"])
    states = {row["name"]: row["values"] for row in found["results"]}
    assert states["state"] == ["finished", "failed"]
    assert states["steps"] == ["8", "-"]
    assert {row["name"]: row["better"] for row in found["results"]}["steps"] == []


def tracked(*arguments: Any) -> Result:
    return called("track", *arguments)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of three steps in which another launcher started two processes: on one, the
    checks of its recipe fail."""
    tracker = {"use": "track.sqlite", "file": str(tmp_path / "runs.sqlite")}
    recipe = yaml.safe_load(tiny_project(tmp_path, track=tracker).read_text())
    del recipe["launch"]["procs"]
    recipe["stages"]["train"]["accumulation"] = 2
    recipe["stages"]["train"]["generate"]["prompts"] = ["https://me:secret@host/"]
    return made(tmp_path / "run", (), [step(n) for n in (1, 2, 3)], recipe)


def test_processes_that_another_launcher_started(run: Path) -> None:
    result = tracked(run)
    assert (result.exit_code, result.output) == (0, "track: 3 steps sent\n")
    assert api.RunOutcome(run).results() == {}
    assert clean.find(run).notes == ("has not finished: its checkpoints stay",)


def test_passwords_stay_here(run: Path) -> None:
    assert tracked(run).exit_code == 0
    found = sqlite3.connect(run.parent / "runs.sqlite")
    ((recipe,),) = found.execute("select recipe from runs").fetchall()
    found.close()
    written = json.loads(recipe)["stages"]["train"]["generate"]
    assert written["prompts"] == ["https://***@host/"]


def test_only_steps_that_were_sent_are_counted(run: Path) -> None:
    assert tracked(run).output == "track: 3 steps sent\n"
    add(run, [{"step": 3, "eval_loss": 3.0}, *(step(n) for n in range(4, 10))])
    result = tracked(run, "track.every=3")
    assert result.output == "track: 3 steps sent\n"  # 6, 9, and 3 for its evaluation
    assert tracked(run).output == "track: 0 steps sent\n"


def test_a_run_under_way_is_left_to_its_own_process(run: Path) -> None:
    with rundir.locked(run):  # as in a resume
        result = tracked(run)
    assert result.exit_code == 2
    assert result.output == f"error: {run} is under way, and is sent while it runs\n"


def test_a_tracker_that_fails_does_not_keep_others_from_sending(run: Path) -> None:
    file = run / rundir.RECIPE
    recipe = yaml.safe_load(file.read_text())
    other = str(run.parent / "second.sqlite")
    recipe["stages"]["second"] = {"use": "track.sqlite", "file": other}
    replace_text(file, yaml.safe_dump(recipe, sort_keys=False))
    result = tracked(run, f"track.file={run}")  # a folder
    assert result.exit_code == 1
    assert "error: track: tracking has ended: " in result.output
    assert "second: 3 steps sent" in result.output


def test_a_package_that_is_missing_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.track.stage.find_spec", lambda name: None)
    result = tracked(run, "track={use: track.wandb}")
    assert result.exit_code == 2
    assert "wandb is not installed (pip install 'pipetrain[wandb]')" in result.output


def test_an_error_of_a_tracker_is_a_line(run: Path) -> None:
    result = tracked(run, f"track.file={run}")  # a folder
    assert result.exit_code == 1
    where = run / "trackers/track.txt"
    assert result.output == (
        "error: track: tracking has ended: OperationalError: unable to open database file "
        f"(more in {where})\n"
    )
    assert where.read_text().startswith("Traceback")
