"""Artifacts by the kind of stage that returns them, and the training that each belongs to.

An engine, its checkpoints and the callbacks of its steps belong to one training: later ones take
their own. All files and records of a recipe's first training are named as in a recipe that trains
once, and files of a further one have the name of its slot: so a slot that is added after a training
does not change it."""

from __future__ import annotations

from pipeline.chain.entry_points import kind_of
from pipeline.contracts.callbacks import StepCallback
from pipeline.contracts.data import Data
from pipeline.contracts.engine import Engine
from pipeline.contracts.export import ExportedModel
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.plan_view import Wiring
from pipeline.contracts.precision import Precision
from pipeline.contracts.signature import gives, needs
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
OF_ONE = (Engine, Checkpoints, StepCallback)
"""Types of artifacts that are of one training."""


def wrong_artifact(stage: type, name: str) -> str:
    """A sentence if a stage called `name` returns something else than its kind; otherwise empty.
    Raises PluginError for annotations that cannot be read."""
    kind = kind_of(name)
    given, wanted = gives(stage), KINDS.get(kind)
    if wanted is None or (given is not None and issubclass(given, wanted)):
        return ""
    shown = given.__name__ if given else "nothing"
    return f"{name} returns {shown}; stages of kind {kind} return {wanted.__name__}"


def trains(kind: type | None) -> bool:
    """Whether a stage trains: it returns a trained run, and takes something to make it from."""
    return kind is not None and issubclass(gives(kind) or object, TrainedRun) and bool(needs(kind))


def prepares(kind: type | None) -> bool:
    """Whether a stage trains, or returns what one training takes."""
    return kind is not None and issubclass(gives(kind) or object, (TrainedRun, *OF_ONE))


def training_slots(wiring: Wiring) -> list[str]:
    """Slots that train, in order."""
    return [slot for slot, kind in wiring.kinds.items() if trains(kind)]


def training_of(wiring: Wiring, slot: str) -> str:
    """The slot of the training that `slot` is of: the first that takes what it returns, if that is
    of one training; else the one before it. Empty for the first, and in a recipe that trains
    nothing."""
    order, found = list(wiring.kinds), training_slots(wiring)
    own = [one for one in found if order.index(one) <= order.index(slot)][-1:] or found[:1]
    if any(wiring.gives(slot, kind) for kind in OF_ONE):
        own = [one for one in wiring.readers(slot) if one in found][:1] or own
    return "" if own == found[:1] else own[0]
