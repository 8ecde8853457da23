"""`pipe ls`, `status` and `logs` on runs that have finished, have failed, and are under way; and
where there is none. `pipe clean` is tested in tests/pipeline/execution."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.execution import failures, rundir
from tests.pipeline.conftest import TinyRun
from tests.support.pipe import Pipe
from tests.support.tiny_project import CHAIN
from tests.support.waiting import becomes


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


def test_a_finished_run(finished: TinyRun) -> None:
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


def test_as_json(finished: TinyRun, failed: Path) -> None:
    found = json.loads(pipe("status", "--json").stdout)
    assert (found["schema_version"], found["folder"]) == (1, "runs/tiny")
    assert (found["state"], found["slot"], found["activity"]) == ("finished", None, None)
    steps = [record for record in finished.records if "loss" in record]
    assert found["step"] == steps[-1]
    assert (found["evaluation"]["step"], found["checkpoint"]["step"]) == (8, 8)
    assert (found["seconds_left"], found["ended_early"]) == (None, None)
    speed = sum(one["tokens_per_second"] * one["step_seconds"] for one in steps)
    mean = speed / sum(one["step_seconds"] for one in steps)
    assert found["mean_tokens_per_second"] == pytest.approx(mean)
    assert found["measurements"] == {}
    other = json.loads(pipe("status", failed, "--json").stdout)
    assert (other["state"], other["step"]) == ("failed", None)


def test_a_failed_run(failed: Path) -> None:
    shown = pipe("status", failed)
    assert shown.stdout.split()[:3] == ["the", "run", "failed"]
    assert "✓ declare  ✗ train  · export  · report" in shown.stdout
    assert shown.stdout.splitlines()[-1] == f"continue  pipe resume '{failed}'"
    assert "boom" in pipe("logs", failed, "--rank", "1").stdout
    assert "boom" in (failed / "report.html").read_text()
    listed = json.loads(pipe("ls", failed.parent, "--json").stdout)
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


def test_logs(finished: TinyRun) -> None:
    whole = log_of(finished.folder)
    assert pipe("logs").stdout == whole
    assert pipe("logs", "-f").stdout == whole
    assert pipe("logs", "runs/tiny", "-n", "2").stdout.splitlines() == whole.splitlines()[-2:]
    assert pipe("logs", "-n", "0").stdout == ""
    other = (finished.folder / "logs/rank-00001.log").read_text()
    assert pipe("logs", "--rank", "1").stdout == other != whole
    missing = pipe("logs", "--rank", "2")
    assert (missing.exit_code, missing.stderr) == (
        2, "run: runs/tiny\nerror: runs/tiny has no log of rank 2 (known here: 0, 1)\n"
    )  # fmt: skip


def test_a_log_with_a_line_that_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.commands.runs.LONGEST", 20)
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


def test_the_newest_run_is_named_and_taken(finished: TinyRun) -> None:
    for command in ("status", "inspect", "report"):
        shown = pipe(command)
        assert (shown.exit_code, shown.stderr) == (0, "run: runs/tiny\n"), shown.output
    # an override in its place is one of the newest run
    refused = pipe("resume", "train.stpes=9", "--dry-run")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("run: runs/tiny\ncommand line, override 1: train.stpes:")


def a_run(root: Path, name: str, *events: str, steps: int = 0, started: float = 100.0) -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "recipe.yaml").write_text("name: x\n")
    lines = [
        {"time": started + n, "event": event, "slot": "train"} for n, event in enumerate(events)
    ]
    (folder / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = [json.dumps({"step": step, "loss": 4.0 / step}) for step in range(1, steps + 1)]
    best = {"step": 9, "eval_loss": 1, "best_step": 3, "best_eval_loss": 0.5}
    if steps:
        (folder / "metrics.jsonl").write_text("\n".join([*metrics, json.dumps(best)]) + "\n")
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "no run").mkdir()
    (tmp_path / "file").touch()
    a_run(tmp_path, "failed", "run started", "slot started", "run failed", started=400.0, steps=2)
    a_run(tmp_path, "finished", "run started", "slot started", "run finished", steps=4)
    a_run(tmp_path, "stopped", "run started", "slot started", started=200.0)
    again = ("run started", "run failed", "run started", "slot started")
    a_run(tmp_path, "stopped later", *again, started=250.0)
    lost = a_run(tmp_path, "lost", "run started", "slot started", started=300.0)
    failures.record(lost, 1, "train", ValueError("of another rank"))
    return tmp_path


def listed(*arguments: str) -> str:
    result = pipe("ls", *arguments)
    assert result.exit_code == 0
    return result.stdout


def test_list_as_json(runs: Path) -> None:
    with rundir.locked(runs / "stopped later"):
        found = json.loads(listed("--json", str(runs)))

    def entry(
        name: str, state: str, started: float, step: int | None, loss: float | None
    ) -> object:
        return {
            "folder": str(runs / name), "state": state, "started": started,
            "slot": "train", "step": step, "loss": loss, "damage": None,
            "best": step and {"step": 3, "eval_loss": 0.5}, "ended_early": None, "training": None,
        }  # fmt: skip

    assert found == [
        entry("finished", "finished", 100.0, 4, 1.0),
        entry("stopped", "stopped", 200.0, None, None),
        entry("stopped later", "running", 250.0, None, None),
        entry("lost", "failed", 300.0, None, None),
        entry("failed", "failed", 400.0, 2, 2.0),
    ]


def test_list(runs: Path) -> None:
    lines = listed(str(runs)).splitlines()
    assert len(lines) == 5
    assert lines[0].endswith(
        f"finished   {runs}/finished  step 4  loss 1.0000  held out 0.5000 at step 3 (best)"
    )
    assert lines[-1].endswith(
        f"failed     {runs}/failed  step 2  loss 2.0000  held out 0.5000 at step 3 (best)  in train"
    )


def test_a_damaged_journal_hides_no_other_run(runs: Path) -> None:
    journal = runs / "lost" / "journal.jsonl"
    journal.write_bytes(b"\xff" + journal.read_bytes()[1:-1] + b"\xff\n")
    result = pipe("ls", runs)
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 5
    assert f"damaged    {runs}/lost\n" in result.stdout
    assert f"  {journal}: line 2 is not as it was written (to continue from " in result.stderr
    told = {Path(run["folder"]).name: run for run in json.loads(listed("--json", str(runs)))}
    assert [run["state"] for run in told.values()].count("damaged") == 1
    assert told["lost"]["damage"].startswith(f"{journal}: line 2 is not as it was written")


def test_no_runs(tmp_path: Path) -> None:
    result = pipe("ls", tmp_path)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"no runs in {tmp_path}\n"
    assert listed("--json", str(tmp_path)) == "[]\n"


def test_folders_of_others(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_file = Path.is_file

    def closed(path: Path) -> bool:
        if path.parent.name == "finished":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", closed)
    result = pipe("ls", runs)
    assert result.exit_code == 0
    assert "1 folder of others cannot be read" in result.stderr.splitlines()


def test_garbage_in_metrics_is_passed_over(tmp_path: Path) -> None:
    run = a_run(tmp_path, "run", "run started", "slot started", steps=2)
    garbage = b'\xff\n{"step": "x", "loss": "y"}\n{"step": 3, "loss": []}\n{"best_step": {}}\n'
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(garbage)
    result = pipe("ls", tmp_path)
    assert result.exit_code == 0
    assert "step 2  loss 2.0000  held out 0.5000 at step 3 (best)" in result.output


def test_a_run_or_no_folder_is_not_a_list(runs: Path) -> None:
    one = pipe("ls", runs / "finished")
    assert one.exit_code == 2
    hint = f"pipe status {runs}/finished"
    assert one.stderr == f"error: {runs}/finished is a run ({hint})\n"
    none = pipe("ls", runs / "nope")
    assert (none.exit_code, none.stderr) == (2, f"error: {runs}/nope: no such folder\n")


def test_a_training_that_ended_early(tmp_path: Path) -> None:
    run = a_run(tmp_path, "early", "run started", "run finished", steps=4)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "ended_early": "enough\x1b[2J"}) + "\n")
    assert listed(str(tmp_path)).rstrip().endswith("  ended early: enough\\u001b[2J")
    assert json.loads(listed("--json", str(tmp_path)))[0]["ended_early"] == "enough\\u001b[2J"
    with (run / "metrics.jsonl").open("a") as file:  # resumed with other settings
        file.write(json.dumps({"step": 5, "loss": 1.0}) + "\n")
    assert "ended early" not in listed(str(tmp_path))
