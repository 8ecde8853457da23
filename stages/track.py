"""Trackers: other programs that show runs."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import secrets
import shlex
import sqlite3
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline import PlanView, Problem
from pipeline.track import Outcome, RunFacts, Tracker, TrackerStage
from pipeline.utils import expanded, hidden_in, shown

LONGEST = 500
"""Characters of a parameter's value that every version of MLflow takes."""
AT_ONCE = 100
"""Parameters that one call takes."""
STATUS: Mapping[Outcome, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


@dataclass(frozen=True, kw_only=True)
class TrackMlflow(TrackerStage):
    """Send measurements to an MLflow server, or keep them in a folder as MLflow does."""

    package = "mlflow"
    extra = "mlflow"

    tracking_uri: str | None = None
    """Address of the server, or a folder; null does as `MLFLOW_TRACKING_URI` says. Name and
    password are left to `MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`."""
    experiment: str | None = None
    """Null takes the recipe's name."""
    artifacts: str | None = None
    """Where an experiment that is not there yet keeps its files; null leaves that to MLflow."""
    name: str | None = None
    """Name of the run; null takes its folder's name."""

    def tracker(self) -> Tracker:
        return MlflowTracker(self)

    def check(self, plan: PlanView) -> Iterator[Problem]:
        """Yield also a password that is not a variable's value: the run's folder would keep it."""
        yield from super().check(plan)
        uri = self.tracking_uri or ""
        if shown(uri) != uri and not hidden_in(uri):
            yield Problem(
                key="tracking_uri",
                message="holds a name or a password, which the run's folder would keep",
                hint="set MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, in the environment",
            )


@dataclass
class MlflowTracker(Tracker):
    """A run of MLflow, found again by its id. Fields of the recipe are its parameters."""

    settings: TrackMlflow

    def open(self, run: RunFacts, state: Mapping[str, Any]) -> Mapping[str, Any]:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        own = self.settings
        places = (own.tracking_uri, own.artifacts)  # folders or addresses
        uri, artifacts = (each and os.path.expanduser(each) for each in places)  # noqa: PTH111
        self._client = client = MlflowClient(tracking_uri=uri)
        self._id = state.get("run_id")
        if not self._id:
            name = own.experiment or str(run.recipe["name"])
            known = client.get_experiment_by_name(name)
            number = known and known.experiment_id
            number = number or client.create_experiment(name, artifact_location=artifacts)
            self._id = client.create_run(number, run_name=own.name or run.name).info.run_id
        fields = dict(_flat(run.recipe))
        known = client.get_run(self._id).data.params
        params = [Param(k, v[:LONGEST]) for k, v in fields.items() if k not in known]
        for first in range(0, len(params), AT_ONCE):
            client.log_batch(self._id, params=params[first : first + AT_ONCE])
        client.set_terminated(self._id, status="RUNNING")
        return {"run_id": self._id}

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        from mlflow.entities import Metric

        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        found = [Metric(name, value, round(1000 * time), step) for name, value in finite.items()]
        self._client.log_batch(self._id, metrics=found)

    def log_text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{name}/step-{step:08d}.txt")

    def close(self, outcome: Outcome) -> None:
        self._client.set_terminated(self._id, status=STATUS[outcome])


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted path and text of every value."""
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(inner)


SCHEMA = """
create table if not exists runs (
  run text primary key, name text not null, recipe text not null, environment text not null,
  outcome text);
create table if not exists metrics (
  run text not null, step integer not null, name text not null, value real not null,
  time real not null, primary key (run, step, name)) without rowid;
create table if not exists texts (
  run text not null, step integer not null, name text not null, text text not null,
  primary key (run, step, name)) without rowid;
"""


@dataclass(frozen=True, kw_only=True)
class TrackSqlite(TrackerStage):
    """Keep measurements in a SQLite file, in tables `runs`, `metrics` and `texts`.

    Several runs can write to one file, also at a time. `run` is a random text that tells runs
    apart whose folders have the same name.
    """

    file: str
    """The file; it is made if it is not there."""

    def tracker(self) -> Tracker:
        return SqliteTracker(expanded(self.file))


@dataclass
class SqliteTracker(Tracker):
    """Writes each record in its own transaction."""

    path: Path
    _run: str = field(default="", init=False)

    def open(self, run: RunFacts, state: Mapping[str, Any]) -> Mapping[str, Any]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = sqlite3.connect(self.path, timeout=30)
        self._run = state.get("run") or uuid.uuid4().hex
        with self._file:
            self._file.executescript(SCHEMA)
            self._file.execute(
                "insert or replace into runs values (?, ?, ?, ?, null)",
                (self._run, run.name, json.dumps(run.recipe), json.dumps(run.environment)),
            )
        return {"run": self._run}

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        rows = [(self._run, step, name, value, time) for name, value in metrics.items()]
        with self._file:
            self._file.executemany("insert or replace into metrics values (?, ?, ?, ?, ?)", rows)

    def log_text(self, step: int, name: str, text: str) -> None:
        values = self._run, step, name, text
        with self._file:
            self._file.execute("insert or replace into texts values (?, ?, ?, ?)", values)

    def close(self, outcome: Outcome) -> None:
        with self._file:
            self._file.execute("update runs set outcome = ? where run = ?", (outcome, self._run))
        self._file.close()


@dataclass(frozen=True, kw_only=True)
class TrackTensorboard(TrackerStage):
    """Write event files that TensorBoard shows: `tensorboard --logdir FOLDER`."""

    package = "tensorboard"
    extra = "tensorboard"

    folder: str | None = None
    """Folder in which the run gets its own folder; null writes to `tensorboard` in the run's
    folder."""

    def tracker(self) -> Tracker:
        return TensorboardTracker(self.folder)


@dataclass
class TensorboardTracker(Tracker):
    """Scalars by step, generated texts, and the recipe as a text, all written at once."""

    parent: str | None

    def open(self, run: RunFacts, state: Mapping[str, Any]) -> Mapping[str, Any]:
        from torch.utils.tensorboard import SummaryWriter

        # In the run's folder the place is not kept: that folder may be moved.
        # It is a path, also in a folder that came from elsewhere: TensorBoard opens any address.
        given = state.get("folder") and str(Path(state["folder"]))
        if self.parent and not given:
            for number in itertools.count(1):  # another run may have a folder of this name
                name = f"{run.name}-{number}" if number > 1 else run.name
                folder = expanded(self.parent) / name
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(parents=True)
                    given = str(folder)
                    break
        self._writer = SummaryWriter(given or str(run.folder / "tensorboard"))
        if not state:
            recipe = json.dumps(run.recipe, indent=1)
            self._writer.add_text("recipe", f"```json\n{recipe}\n```", 0)
        return {"folder": given}

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, walltime=time)
        self._writer.flush()

    def log_text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)
        self._writer.flush()

    def close(self, outcome: Outcome) -> None:
        self._writer.close()


@dataclass(frozen=True, kw_only=True)
class TrackTrackio(TrackerStage):
    """Keep measurements where trackio shows them: `trackio show`.

    They lie on this machine, in `TRACKIO_DIR`, unless a space of the Hugging Face hub is named.
    """

    package = "trackio"
    extra = "trackio"

    project: str | None = None
    """Null takes the recipe's name."""
    name: str | None = None
    """Name of the run, null takes its folder's name; a few letters are added, since trackio takes
    runs of the same name for one."""
    space: str | None = None
    """Space of the Hugging Face hub, OWNER/NAME, that gets the measurements instead."""
    folder: str | None = None
    """Folder instead of the one that `TRACKIO_DIR` names."""

    def tracker(self) -> Tracker:
        return TrackioTracker(self)

    def unsent(self, folder: Path) -> str:
        return "trackio sync --all" if self.space else ""


@dataclass
class TrackioTracker(Tracker):
    """A run of trackio, found again by its name."""

    settings: TrackTrackio

    def open(self, run: RunFacts, state: Mapping[str, Any]) -> Mapping[str, Any]:
        own = self.settings
        if own.folder is not None:
            os.environ["TRACKIO_DIR"] = str(expanded(own.folder))
        import trackio

        name = state.get("name") or f"{own.name or run.name}-{secrets.token_hex(3)}"
        self._run = trackio.init(
            project=own.project or str(run.recipe["name"]), name=name, space_id=own.space,
            config={"recipe": dict(run.recipe)}, resume="allow", embed=False,
        )  # fmt: skip
        return {"name": name}

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._run.log(dict(metrics), step=step)

    def log_text(self, step: int, name: str, text: str) -> None:
        import trackio

        self._run.log({name: trackio.Markdown(text)}, step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish()


@dataclass(frozen=True, kw_only=True)
class TrackWandb(TrackerStage):
    """Send measurements to Weights & Biases.

    The key comes from `WANDB_API_KEY` or `wandb login`, never from the recipe. With `mode: offline`
    nothing is sent: `wandb sync` does that later, from a machine with a network.
    """

    package = "wandb"
    extra = "wandb"

    project: str | None = None
    """Null takes the recipe's name."""
    entity: str | None = None
    """User or team; null takes the default of the account."""
    name: str | None = None
    """Name of the run; null takes its folder's name."""
    group: str | None = None
    """Name that runs have in common, which are then shown together."""
    tags: tuple[str, ...] = ()
    """Words by which runs are found."""
    notes: str | None = None
    """Text about the run."""
    mode: Literal["online", "offline"] | None = None
    """Null does as `WANDB_MODE` says; online without it."""

    def tracker(self) -> Tracker:
        return WandbTracker(self)

    def unsent(self, folder: Path) -> str:
        return f"wandb sync {shlex.quote(str(folder))}/wandb/*run-*"


@dataclass
class WandbTracker(Tracker):
    """A run of W&B, found again by its id."""

    settings: TrackWandb

    def open(self, run: RunFacts, state: Mapping[str, Any]) -> Mapping[str, Any]:
        import wandb

        own = self.settings
        self._run = wandb.init(
            project=own.project or str(run.recipe["name"]), entity=own.entity,
            name=own.name or run.name, group=own.group, tags=list(own.tags), notes=own.notes,
            mode=own.mode, id=state.get("id"), resume="allow", dir=str(run.folder),
            config={"recipe": dict(run.recipe), "environment": dict(run.environment)},
        )  # fmt: skip
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return {"id": self._run.id}

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._run.log({**metrics, "step": step, "_timestamp": time})

    def log_text(self, step: int, name: str, text: str) -> None:
        import html

        import wandb

        shown = f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre>"
        self._run.log({name: wandb.Html(shown), "step": step})

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=int(outcome == "failed"))
