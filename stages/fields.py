"""Fields that several stages have, of periods, paths and batches, and checks of artifacts of one
training that come from slots of another."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from annotated_types import Gt
from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from pipeline import (
    Checkpoints,
    Data,
    Engine,
    ModelSource,
    OptimizerPlan,
    PlanView,
    Problem,
    TrainedRun,
    Weights,
    traits,
)

_DECIMAL = r"(0?\.[0-9]{0,8}[1-9][0-9]{0,8}|[1-9][0-9]{0,8}(\.[0-9]{1,8})?)"
_RATIO = r"[1-9][0-9]{0,8}/[1-9][0-9]{0,8}"
_EPOCHS = f"^({_DECIMAL}|{_RATIO}) epochs?$"


def _in_words(value: str) -> str:
    """Refuse a text that is not part of an epoch, without a regular expression in the message."""
    if not re.fullmatch(_EPOCHS, value):
        raise PydanticCustomError(
            "period",
            "must be a number of steps, or a part of an epoch as in `1 epoch`, `0.25 epochs` or "
            "`1/3 epochs`",
        )
    return value


Period: TypeAlias = (
    Annotated[int, Gt(0)]
    | Annotated[
        str, AfterValidator(_in_words), WithJsonSchema({"type": "string", "pattern": _EPOCHS})
    ]
)
"""A number of steps, or a part of an epoch: `1 epoch`, `0.25 epochs`, `1/3 epochs`."""


def epoch_problems(
    trains: Iterable[Any], plan: PlanView, **periods: int | str | None
) -> Iterator[Problem]:
    """Yield the fields that count epochs of data that do not know their number."""
    given = [plan.producer(train, Data) for train in trains]
    if all(data.has_epochs for data in given if isinstance(data, traits.HasEpochs)):
        return
    for key, period in periods.items():
        if isinstance(period, str):
            message = f"is {period}, and the data slot does not know how many samples an epoch has"
            yield Problem(key=key, message=message, hint="give a number of steps")


def instead_of_variable(path: str) -> str:
    """Return what to write for a path with a variable, as `$DATA/x.jsonl`, or an empty text."""
    found = re.search(r"\$(\w+)", path)
    if found is None:
        return ""
    written = path.replace(found[0], f"${{oc.env:{found[1]}}}")
    return f"write {written}, and `env: [{found[1]}]` at the top of the recipe"


Count = Annotated[int, Gt(0)]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The samples of each optimizer step, and their division into micro-batches."""

    one_of: ClassVar[Sequence[Sequence[str]]] = (
        ("steps", "epochs"),
        ("micro_batch_size", "accumulation"),
    )
    """At most one of these fields is set, for hints."""
    global_batch_size: Count
    """Samples in one optimizer step, over all ranks and micro-batches."""
    steps: Count | None = None
    """Optimizer steps to train for. Exactly one of `steps` and `epochs`."""
    epochs: Annotated[float, Gt(0)] | None = None
    """Passes over the training samples, may be a fraction. Exactly one of `steps` and `epochs`."""
    micro_batch_size: Count | None = None
    """Samples of one forward pass on one rank; null derives it from `accumulation`."""
    accumulation: Count | None = None
    """Micro-batches of one step on one rank; null derives it from `micro_batch_size`, or is 1.
    Where the samples do not divide evenly, fewer can be enough."""
    shuffle: bool = True
    """Shuffle again every epoch, by the recipe's seed; false trains in file order."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        if (self.steps is None) == (self.epochs is None):
            slot = plan.slot(self) or "train"
            both = f"remove one of the two lines, or add {slot}.epochs=null to the command line"
            hint = "such as `epochs: 3`" if self.steps is None else both
            message = "give exactly one of steps and epochs"
            yield Problem(key="steps", message=message, hint=hint)
        ranks = plan.data_ranks(self)
        if self.micro_batch_size is not None and self.accumulation is not None:
            given = self.micro_batch_size * self.accumulation * ranks
            if ranks and given != self.global_batch_size:
                what = "processes" if ranks == plan.procs else "data-parallel ranks"
                yield Problem(
                    key="global_batch_size",
                    message=f"is {self.global_batch_size}, but micro_batch_size x accumulation x "
                    f"{what} = {self.micro_batch_size} x {self.accumulation} x {ranks} = {given}",
                    hint="leave out one of micro_batch_size and accumulation",
                )
        share = -(-self.global_batch_size // (ranks or 1))
        if self.micro_batch_size is not None and self.micro_batch_size > share:
            yield Problem(
                key="micro_batch_size",
                message=f"{self.micro_batch_size} is more than the {share} samples of a step on a "
                f"rank: micro-batches have {share}",
                hint="raise global_batch_size for larger ones",
                warning=True,
            )

    def microbatch_size(self, ranks: int) -> int:
        """Samples of one forward pass, given or derived, on `ranks` data-parallel ranks."""
        if self.micro_batch_size is not None:
            return self.micro_batch_size
        return -(-self.global_batch_size // (ranks * (self.accumulation or 1)))


def result_problems(stage: Any, plan: PlanView) -> Iterator[Problem]:
    """Yield a record or model that a stage gets from another training than its weights."""
    wires, slot = plan.wiring, plan.slot(stage)
    weights = wires.producer(slot, Weights)
    own = wires.producer(slot, TrainedRun)
    read = wires.producer(weights, TrainedRun) if weights else own
    if own and read and own != read:
        yield Problem(
            message=f"gets the training of slot `{own}`, but the weights of slot `{weights}` are "
            f"from slot `{read}`",
            hint=f"write `takes: {{trained: {read}}}` in this slot, or in slot `{weights}` "
            f"`takes: {{trained: {own}}}`",
        )
        return
    model, then = wires.producer(slot, ModelSource), wires.producer(read or "", ModelSource)
    if model and then and model != then:
        yield Problem(
            message=f"gets the model of slot `{model}`, but slot `{read}` trained the one of slot "
            f"`{then}`",
            hint=f"write `takes: {{model: {then}}}` in this slot",
        )


def made_by_training(stage: Any, plan: PlanView) -> str | None:
    """The training that made the model that a stage gets; None for a model of files."""
    first = [*_of_one_training(plan, plan.slot(stage))][-1:]
    return plan.wiring.producer(first[0], TrainedRun) if first else None


def _of_one_training(plan: PlanView, slot: str) -> Iterator[str]:
    """The slots whose models a slot gets, changed one by another, since the training before."""
    wires = plan.wiring
    for one in wires.producers(slot, ModelSource):
        yield one
        if wires.producer(one, TrainedRun):
            return


def mixed_problems(stage: Any, plan: PlanView) -> Iterator[Problem]:
    """Yield a model or an optimizer that a stage gets and that its engine was not built from, an
    engine that trains nothing, and checkpoints that save another engine. An adapter after the wrap
    slot is a mistake of the adapter's slot."""
    wires, slot = plan.wiring, plan.slot(stage)
    for wrap in [*wires.producers(slot, Engine)][-1:]:
        built, own = wires.producer(wrap, ModelSource), wires.producer(slot, ModelSource)
        if built and own and built not in _of_one_training(plan, slot):
            yield Problem(
                message=f"gets the model of slot `{own}`, but its engine, slot `{wrap}`, was built "
                f"from slot `{built}`",
                hint=f"write `takes: {{model: {built}}}` in this slot, or in slot `{wrap}` "
                f"`takes: {{model: {own}}}`",
            )
        rules, own = wires.producer(wrap, OptimizerPlan), wires.producer(slot, OptimizerPlan)
        optimizer = plan.slots.get(rules or "")
        nothing = isinstance(optimizer, traits.DeclaresRules) and not optimizer.update_rules()
        if own and nothing:
            yield Problem(
                message=f"trains the engine of slot `{wrap}`, whose optimizer, slot `{rules}`, "
                "trains nothing",
                hint=f"put an optimizer slot before slot `{wrap}`, or another wrap slot after it",
            )
        elif rules and own and rules != own:
            yield Problem(
                message=f"gets the optimizer of slot `{own}`, but its engine, slot `{wrap}`, was "
                f"built with slot `{rules}`",
                hint=f"write `takes: {{optimizer: {rules}}}` in this slot",
            )
        saving = wires.producer(slot, Checkpoints)
        for saved in [*wires.producers(saving or "", Engine)][-1:]:
            if saved != wrap:
                yield Problem(
                    message=f"trains the engine of slot `{wrap}`, but slot `{saving}` saves the "
                    f"engine of slot `{saved}`",
                    hint=f"write `takes: {{engine: {wrap}}}` in slot `{saving}`, or another slot "
                    "that returns an engine here",
                )
