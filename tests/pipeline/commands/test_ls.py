"""`pipe ls`."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import main
from pipeline.execution import failures, rundir


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
    result = CliRunner().invoke(main, ["ls", *arguments])
    assert result.exit_code == 0
    return result.stdout


def test_json(runs: Path) -> None:
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


def test_lines(runs: Path) -> None:
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
    result = CliRunner().invoke(main, ["ls", str(runs)])
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 5
    assert f"damaged    {runs}/lost\n" in result.stdout
    assert f"  {journal}: line 2 is not as it was written (to continue from " in result.stderr
    told = {Path(run["folder"]).name: run for run in json.loads(listed("--json", str(runs)))}
    assert [run["state"] for run in told.values()].count("damaged") == 1
    assert told["lost"]["damage"].startswith(f"{journal}: line 2 is not as it was written")


def test_none(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["ls", str(tmp_path)])
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
    result = CliRunner().invoke(main, ["ls", str(runs)])
    assert result.exit_code == 0
    assert "1 folder of others cannot be read" in result.stderr.splitlines()


def test_garbage_in_metrics_is_passed_over(tmp_path: Path) -> None:
    run = a_run(tmp_path, "run", "run started", "slot started", steps=2)
    garbage = b'\xff\n{"step": "x", "loss": "y"}\n{"step": 3, "loss": []}\n{"best_step": {}}\n'
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(garbage)
    result = CliRunner().invoke(main, ["ls", str(tmp_path)])
    assert result.exit_code == 0
    assert "step 2  loss 2.0000  held out 0.5000 at step 3 (best)" in result.output


def test_a_run_or_no_folder_is_not_a_list(runs: Path) -> None:
    one = CliRunner().invoke(main, ["ls", str(runs / "finished")])
    assert one.exit_code == 2
    hint = f"pipe status {runs}/finished"
    assert one.stderr == f"error: {runs}/finished is a run ({hint})\n"
    none = CliRunner().invoke(main, ["ls", str(runs / "nope")])
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
