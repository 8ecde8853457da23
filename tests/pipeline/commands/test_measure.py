"""`pipe profile`: the table, and the traces."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import main
from pipeline.contracts.metrics import records
from tests.support.pipe import Outcome, Pipe
from tests.support.tiny_project import tiny_project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Pipe:
    folder = tmp_path_factory.mktemp("project")
    tiny_project(folder)
    return Pipe(folder, folder)


@pytest.fixture(scope="module")
def profiled(project: Pipe) -> Outcome:
    done = project("profile", "tiny.yaml", "--steps", "2-3", "--run-dir", "profiled")
    assert done.code == 0, done.stderr
    return done


def test_the_shares_are_all_of_a_step(profiled: Outcome, project: Pipe) -> None:
    *_, head, second, third, last = profiled.stdout.splitlines()
    assert head.split() == ["step", "seconds", "compute", "communication", "data", "idle"]
    assert last == "traces: profiled/profile"
    found = {
        r["step"]: r for r in records(project.folder / "profiled/metrics.jsonl") if "loss" in r
    }
    assert list(found) == [1, 2, 3]
    for line, step in ((second, 2), (third, 3)):
        cells = re.fullmatch(r" *(\d+) +([\d.]+) +([\d.]+)% +([\d.]+)% +([\d.]+)% +([\d.]+)%", line)
        assert cells is not None, line
        assert int(cells[1]) == step
        assert float(cells[2]) == pytest.approx(found[step]["step_seconds"], abs=6e-4)
        shares = [float(cell) for cell in cells.groups()[2:]]
        assert sum(shares) == pytest.approx(100, abs=0.21)  # four are rounded
        assert shares[0] > 0
        assert shares[1] > 0


def test_traces_name_their_ranks(profiled: Outcome, project: Pipe) -> None:
    folder = project.folder / "profiled/profile"
    names = [f"step-0000000{s}-rank-0000{r}.json.gz" for s in (2, 3) for r in (0, 1)]
    assert sorted(file.name for file in folder.iterdir()) == names
    for rank in (0, 1):
        text = gzip.decompress((folder / f"step-00000003-rank-0000{rank}.json.gz").read_bytes())
        trace = json.loads(text, parse_constant=pytest.fail)
        assert trace["distributedInfo"]["rank"] == rank
        assert trace["distributedInfo"]["world_size"] == 2
        labels = [event["args"]["labels"] for event in trace["traceEvents"]
                  if event["ph"] == "M" and event["name"] == "process_labels"]  # fmt: skip
        assert labels
        kinds = {event["ph"] for event in trace["traceEvents"]}
        assert "X" in kinds
        whole = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert all(event["dur"] >= 0 and event["ts"] > 0 for event in whole)
        assert any(event["name"].startswith("aten::mm") for event in whole)
        assert any("gloo" in event["name"] for event in whole)


def test_nothing_is_exported(profiled: Outcome, project: Pipe) -> None:
    assert not (project.folder / "profiled/export").exists()


def test_under_another_launcher_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torchrun = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
                "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    refused = CliRunner().invoke(main, ["profile", "recipe.yaml"])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: pipe profile starts its own processes, and this one ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "9-4"],
         "Error: Invalid value for '--steps': 9-4 is neither a step nor a range of at most 20, "
         "as in 4-6"),
        (["--run-dir", "taken"], "error: taken already holds a run (name a new folder)"),
    ],
)  # fmt: skip
def test_mistakes(options: list[str], message: str, project: Pipe) -> None:
    taken = project.folder / "taken"
    taken.mkdir(exist_ok=True)
    (taken / "recipe.yaml").touch()
    refused = project("profile", "tiny.yaml", *options)
    assert (refused.code, refused.stderr.splitlines()[-1]) == (2, message)
    assert list(Path(taken).iterdir()) == [taken / "recipe.yaml"]
