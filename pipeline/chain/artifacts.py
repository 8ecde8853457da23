"""Artifacts: the kind of stage that returns each, the training that it belongs to, and the results
of slots by their types.

An engine, its checkpoints and the callbacks of its steps belong to one training: later ones take
their own. All files and records of a recipe's first training are named as in a recipe that trains
once, and files of a further one have the name of its slot: so a slot that is added after a training
does not change it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pipeline.chain.registry import kind_of
from pipeline.contracts.callbacks import StepCallback
from pipeline.contracts.data import Data
from pipeline.contracts.engine import Engine
from pipeline.contracts.export import ExportedModel
from pipeline.contracts.model import ModelSource, Weights
from pipeline.contracts.optimizer import OptimizerPlan, Precision
from pipeline.contracts.plan_view import Wiring
from pipeline.contracts.signature import Need, gives, needs
from pipeline.contracts.training import Checkpoints, TrainedRun
from pipeline.errors import UsageError

T = TypeVar("T")
Inputs = Mapping[str, str | None]
"""Parameter of a stage's `run` -> the slot whose artifact it gets; None without one."""
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
    of one training; else the one before it. Empty for the first, and without one."""
    order, found = list(wiring.kinds), training_slots(wiring)
    own = [one for one in found if order.index(one) <= order.index(slot)][-1:] or found[:1]
    if any(wiring.gives(slot, kind) for kind in OF_ONE):
        own = [one for one in wiring.readers(slot) if one in found][:1] or own
    return "" if own == found[:1] else own[0]


class Results(dict[str, Any]):
    """Results by slot, in the order of slots; they are looked up by type."""

    @classmethod
    def of(cls, *given: object) -> Results:
        """Results of no slot, under keys that no slot can have."""
        return cls({f"<{type(one).__name__}>": one for one in given})

    def latest(self, kind: type[T]) -> T | None:
        """The result of the latest slot that gave something of this kind."""
        return next(reversed([*self.each(kind)]), None)

    def each(self, kind: type[T]) -> Iterator[T]:
        """Everything of this kind, in the order of slots; a tuple stands for all that is in it."""
        for given in self.values():
            every = given if type(given) is tuple else (given,)
            yield from (one for one in every if isinstance(one, kind))

    def require(self, kind: type[T], why: str) -> T:
        """The latest result of this kind. Raises UsageError with the message `why` without one."""
        found = self.latest(kind)
        if found is None:
            raise UsageError(why)
        return found

    def missing(self, owner: object, method: str, inputs: Inputs | None = None) -> list[str]:
        """Names of the types that a method requires and that no slot has given."""
        kind: type = type(owner)
        required = (need for need in needs(kind, method) if not need.optional)
        return [need.type.__name__ for need in required if self._found(need, inputs) is None]

    def call(self, owner: object, method: str, first: object, inputs: Inputs | None = None) -> Any:
        """Call a method with `first` and the results that its parameters get."""
        kind: type = type(owner)
        found = {need.parameter: self._found(need, inputs) for need in needs(kind, method)}
        return getattr(owner, method)(first, **found)

    def _found(self, need: Need, inputs: Inputs | None) -> Any | None:
        """The result of the slot that `inputs` name for a parameter; of one that they do not name,
        the latest of its type."""
        if inputs is not None and need.parameter in inputs:
            return self.get(inputs[need.parameter] or "")
        return self.latest(need.type)
