"""The artifact that stages of each known kind return."""

from __future__ import annotations

from pipeline.chain.entry_points import kind_of
from pipeline.contracts.callbacks import StepCallback
from pipeline.contracts.data import Data
from pipeline.contracts.engine import Engine
from pipeline.contracts.export import ExportedModel
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.precision import Precision
from pipeline.contracts.signature import gives
from pipeline.contracts.tensors import Weights
from pipeline.contracts.training import Checkpoints, TrainedRun

KINDS: dict[str, type] = {
    "model": ModelSource,
    "adapter": ModelSource,
    "precision": Precision,
    "data": Data,
    "optimizer": OptimizerPlan,
    "wrap": Engine,
    "average": Engine,
    "checkpoint": Checkpoints,
    "callback": StepCallback,
    "train": TrainedRun,
    "consolidate": Weights,
    "export": ExportedModel,
}
"""Artifact of each known kind of stage; a new kind may return anything."""


def wrong_artifact(stage: type, name: str) -> str:
    """A sentence if a stage called `name` returns something else than its kind; otherwise empty.
    Raises PluginError for annotations that cannot be read."""
    kind = kind_of(name)
    given, wanted = gives(stage), KINDS.get(kind)
    if wanted is None or (given is not None and issubclass(given, wanted)):
        return ""
    shown = given.__name__ if given else "nothing"
    return f"{name} returns {shown}; stages of kind {kind} return {wanted.__name__}"
