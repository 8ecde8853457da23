"""Each tracker, read back with its own library."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pipeline.testing import problems
from pipeline.track import Outcome, RunFacts, TrackerStage
from pipeline.utils.terminal import hide
from stages.track import TrackMlflow, TrackSqlite, TrackTensorboard, TrackTrackio, TrackWandb

LOSSES = {1: 3.5, 2: 3.25, 3: 3.0, 4: 2.75}


def tracked(stage: TrackerStage, folder: Path) -> None:
    """Track a run that fails behind step 2, and goes on in another process's tracker."""
    folder.mkdir(exist_ok=True)
    recipe = {"name": "made", "stages": {"optimizer": {"use": "optimizer.adamw", "lr": 0.5}}}
    run = RunFacts(name="my-run", recipe=recipe, environment={"python": "3"}, folder=folder)
    state: Mapping[str, Any] = {}
    parts: list[tuple[list[int], Outcome]] = [([1, 2], "failed"), ([3, 4], "finished")]
    for steps, outcome in parts:
        tracker = stage.tracker()
        state = json.loads(json.dumps(tracker.open(run, state)))
        for step in steps:
            tracker.log(step, {"loss": LOSSES[step], "lr": 0.5}, 1_700_000_000.0 + step)
        tracker.log_text(steps[-1], "generated/0", f"a text at {steps[-1]}")
        tracker.close(outcome)


def test_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "runs.sqlite"
    tracked(TrackSqlite(file="~/runs.sqlite"), tmp_path / "run")
    found = sqlite3.connect(file)
    rows = found.execute("select step, value from metrics where name = 'loss' order by step")
    assert dict(rows.fetchall()) == LOSSES
    assert found.execute("select name, outcome from runs").fetchall() == [("my-run", "finished")]
    assert len(found.execute("select * from texts").fetchall()) == 2
    found.close()


def test_sqlite_of_two_runs_whose_folders_have_the_same_name(tmp_path: Path) -> None:
    file = tmp_path / "runs.sqlite"
    for project in ("a", "b"):
        tracked(TrackSqlite(file=str(file)), tmp_path / project)
    found = sqlite3.connect(file)
    assert found.execute("select name from runs").fetchall() == [("my-run",), ("my-run",)]
    counts = found.execute("select count(*) from metrics where name = 'loss' group by run")
    assert counts.fetchall() == [(4,), (4,)]
    found.close()


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracked(TrackTensorboard(), tmp_path / "run")
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    assert {event.step: event.value for event in found.Scalars("loss")} == LOSSES
    assert "generated/0/text_summary" in found.Tags()["tensors"]


def test_tensorboard_in_a_run_that_was_moved(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    state = opened(TrackTensorboard(), before, {})
    before.rename(after)
    opened(TrackTensorboard(), after, state)
    assert not before.exists()
    assert len(list((after / "tensorboard").iterdir())) == 2


def test_tensorboard_of_two_runs_whose_folders_have_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for project in ("a", "b"):
        tracked(TrackTensorboard(folder="~/all"), tmp_path / project)
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["my-run", "my-run-2"]


def test_tensorboard_opens_no_address_of_a_state_that_came_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    opened(TrackTensorboard(), tmp_path / "run", {"folder": "memory://elsewhere"})
    assert not fsspec.filesystem("memory").exists("/elsewhere")
    assert list((tmp_path / "memory:/elsewhere").iterdir())


def opened(stage: TrackerStage, folder: Path, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of a tracker of a run in the folder, after a loss that it was sent."""
    run = RunFacts(name=folder.name, recipe={"name": "made"}, environment={}, folder=folder)
    tracker = stage.tracker()
    found = json.loads(json.dumps(tracker.open(run, state)))
    tracker.log(1, {"loss": 3.5}, 1_700_000_000.0)
    tracker.close("finished")
    return dict(found)


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("HOME", str(tmp_path))
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracked(TrackMlflow(tracking_uri=uri, artifacts="~/files"), tmp_path / "run")
    assert (tmp_path / "files").is_dir()
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("made")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("my-run", "FINISHED")
    assert run.data.params["stages.optimizer.lr"] == "0.5"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert {metric.step: metric.value for metric in history} == LOSSES
    assert [one.path for one in client.list_artifacts(run.info.run_id)] == ["generated"]


def test_wandb(tmp_path: Path) -> None:
    import wandb

    tracked(TrackWandb(mode="offline"), tmp_path / "run")
    wandb.teardown()  # as at the end of a tracker's process: `finish` leaves the writing behind
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    found: dict[int, float] = {}
    ids = set()
    for file in files:
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            items = {(i.key or "/".join(i.nested_key)): i.value_json for i in record.history.item}
            if "loss" in items:
                found[json.loads(items["step"])] = json.loads(items["loss"])
    assert found == LOSSES
    assert len(ids) == 1


BLOCK, HEAD = 32768, 7


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of an offline run's file: after seven bytes, LevelDB's log of blocks, each
    a row of fragments with checksum (4 bytes), length (2) and type (1: 1 whole, 2 first, 3 middle,
    4 last), of W&B's own protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = file.read_bytes(), HEAD, b""
    while at + HEAD <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEAD:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts = (b"" if kind in (1, 2) else parts) + data[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    tracked(TrackTrackio(), tmp_path / "run")
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("made")
    assert re.fullmatch("my-run-[0-9a-f]{6}", run.name)
    logs = SQLiteStorage.get_logs("made", run.name)
    assert {log["step"]: log["loss"] for log in logs if "loss" in log} == LOSSES


def test_trackio_of_two_runs_whose_folders_have_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for project in ("a", "b"):
        tracked(TrackTrackio(project="both"), tmp_path / project)
    import trackio

    assert len(list(trackio.Api().runs("both"))) == 2


@pytest.mark.parametrize("stage", [TrackTensorboard, TrackMlflow, TrackWandb, TrackTrackio])
def test_a_package_that_is_missing_is_found_before_the_start(
    stage: type[TrackerStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(problems(stage, {})) == []
    monkeypatch.setattr("pipeline.track.stage.find_spec", lambda name: None)
    (problem,) = problems(stage, {})
    assert problem.hint == f"pip install 'pipetrain[{stage.extra}]'"


@pytest.mark.parametrize("uri", ["https://me:secret@host/path", "https://host?token=secret"])
def test_passwords_in_the_address_of_mlflow_are_refused(uri: str) -> None:
    (problem,) = problems(TrackMlflow, {"tracking_uri": uri})
    assert (problem.key, "MLFLOW_TRACKING_PASSWORD" in problem.hint) == ("tracking_uri", True)
    assert "secret" not in str(problem)


def test_an_address_of_mlflow_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.utils.terminal._hidden", {})
    hide("https://me:secret@host/path", "$SERVER")  # as loading a recipe does
    assert problems(TrackMlflow, {"tracking_uri": "https://me:secret@host/path"}) == []
    assert problems(TrackMlflow, {"tracking_uri": "https://host/@me"}) == []
