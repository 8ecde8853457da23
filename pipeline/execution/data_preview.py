"""Samples of a recipe without a run: the data slot and the slots that it needs are run here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.contracts.data import NO_TARGET, Data, Sample
from pipeline.contracts.model import ModelSource
from pipeline.contracts.sample_order import ENDLESS, Order
from pipeline.contracts.stage import Context
from pipeline.errors import UsageError
from pipeline.execution.metrics import Metrics
from pipeline.utils.text import plural

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan, PlannedSlot


class Token(NamedTuple):
    """One token of a document and whether it is trained on."""

    id: int
    trained: bool


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The data of a recipe, and the tokenizer of its token ids."""

    data: Data
    tokenizer: Any
    seed: int

    def indices(self, count: int) -> list[int]:
        """Return the first samples in the order of a run with `shuffle: true`."""
        order = self._order
        return [*map(int, order.indices(0, min(count, order.size)))]

    @property
    def size(self) -> int | None:
        """Samples to train on; None for a stream."""
        return None if self._order.size == ENDLESS else self._order.size

    @property
    def heldout(self) -> int:
        """Samples to evaluate on."""
        return len(self.data.heldout) if self.data.heldout else 0

    def summary(self) -> str:
        """Return the numbers of samples for people."""
        packed = ", packed" if self.data.packed else ""
        size = "a stream of samples" if self.size is None else plural(self.size, "sample")
        return f"{size} to train on{packed}, {self.heldout} held out"

    def facts(self) -> dict[str, Any]:
        """Return the numbers of samples for programs."""
        return {"samples": self.size, "heldout": self.heldout, "packed": self.data.packed}

    @functools.cached_property
    def _order(self) -> Order:
        return self.data.train.order(self.seed, shuffle=True)


@contextlib.contextmanager
def without_run(log: logging.Logger, seed: int = 0) -> Iterator[Context]:
    """A context for stages that run in this process alone, in a temporary folder."""
    import torch

    from pipeline.distributed.process_group import DistContext

    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="pipe-show-"))
        yield Context(
            run_dir=Path(scratch),
            seed=seed,
            dist=DistContext(device=torch.device("cpu")),
            log=log,
            metrics=Metrics(None),
            on_exit=stack.callback,
        )


@contextlib.contextmanager
def preview(plan: Plan, log: logging.Logger) -> Iterator[Preview]:
    """Run the recipe's data slot and the slots that it needs, in this process alone, in a temporary
    run folder. Raises UsageError if no slot gives data, and the errors of those stages."""
    gives_data = (step for step in plan.steps if step.gives and issubclass(step.gives, Data))
    step = next(gives_data, None)
    if step is None:
        raise UsageError("no slot of this recipe provides data")
    with contextlib.ExitStack() as stack:
        ctx = stack.enter_context(without_run(log, plan.recipe.seed))
        artifacts: dict[str, Any] = {}
        data = _result(plan, step, ctx, artifacts)
        models = [each for each in artifacts.values() if isinstance(each, ModelSource)]
        if not models:
            raise UsageError(f"slot `{step.slot}` takes no model, so there is no tokenizer")
        yield Preview(data=data, tokenizer=models[-1].tokenizer(), seed=plan.recipe.seed)


def _result(plan: Plan, step: PlannedSlot, ctx: Context, artifacts: dict[str, Any]) -> Any:
    steps = {each.slot: each for each in plan.steps}
    for slot in step.inputs.values():
        if slot is not None and slot not in artifacts:
            artifacts[slot] = _result(plan, steps[slot], ctx, artifacts)
    inputs = {name: slot and artifacts[slot] for name, slot in step.inputs.items()}
    return step.stage.run(dataclasses.replace(ctx, slot=step.slot), **inputs)


def documents(sample: Sample) -> Iterator[list[Token]]:
    """Yield the tokens of each document in a sample, in order. The token behind a document's last
    position is included if it is a target; otherwise the sample does not hold it."""
    positions = sample.positions
    starts = [0] if positions is None else (positions == 0).nonzero()[0].tolist()
    for start, stop in zip(starts, [*starts[1:], len(sample.input_ids)], strict=True):
        ids, labels = sample.input_ids[start:stop].tolist(), sample.labels[start:stop].tolist()
        trained = [False, *(label != NO_TARGET for label in labels)]
        if trained[-1]:
            ids.append(labels[-1])
        yield [Token(token, known) for token, known in zip(ids, trained, strict=False)]
