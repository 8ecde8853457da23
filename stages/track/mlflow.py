"""MLflow as a tracker."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline import PlanView, Problem
from pipeline.track import Outcome, RunFacts, Tracker, TrackerStage
from pipeline.utils import hidden_in, shown

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
        self._client = client = MlflowClient(tracking_uri=own.tracking_uri)
        self._id = state.get("run_id")
        if not self._id:
            name = own.experiment or str(run.recipe["name"])
            known = client.get_experiment_by_name(name)
            number = known and known.experiment_id
            number = number or client.create_experiment(name, artifact_location=own.artifacts)
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
