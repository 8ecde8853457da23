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
from pipeline.run.metrics import Metrics

if TYPE_CHECKING:
    from pipeline.plan.plan import Plan, PlannedSlot


class Token(NamedTuple):
    """One token of a document and whether it is trained on."""

    id: int
    trained: bool


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The data of a recipe, and the tokenizer that reads their ids."""

    data: Data
    tokenizer: Any
    seed: int

    def indices(self, count: int) -> list[int]:
        """The first samples of the order in which a run with `shuffle: true` visits them."""
        order = self._order
        first: list[int] = order.indices(0, min(count, order.size)).tolist()
        return first

    @property
    def size(self) -> int | None:
        """Samples to train on; None for a stream."""
        return None if self._order.size == ENDLESS else self._order.size

    @functools.cached_property
    def _order(self) -> Order:
        return self.data.train.order(self.seed, shuffle=True)


@contextlib.contextmanager
def preview(plan: Plan, log: logging.Logger) -> Iterator[Preview]:
    """Run the recipe's data slot and the slots that it needs, in this process alone, in a run
    folder that is gone afterwards. Raises UsageError when no slot gives data, and what those stages
    raise."""
    step = next((step for step in plan.steps if _gives(step, Data)), None)
    if step is None:
        raise UsageError("no slot of this recipe gives data")
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="pipe-show-"))
        ctx = _context(plan, Path(scratch), log)
        ctx.on_exit = stack.callback
        artifacts: dict[str, Any] = {}
        data = _result(plan, step, ctx, artifacts)
        models = [each for each in artifacts.values() if isinstance(each, ModelSource)]
        if not models:
            message = f"slot `{step.slot}` takes no model, so there is no tokenizer to show by"
            raise UsageError(message)
        yield Preview(data=data, tokenizer=models[-1].tokenizer(), seed=plan.recipe.seed)


def _gives(step: PlannedSlot, kind: type) -> bool:
    return step.gives is not None and issubclass(step.gives, kind)


def _result(plan: Plan, step: PlannedSlot, ctx: Context, artifacts: dict[str, Any]) -> Any:
    steps = {each.slot: each for each in plan.steps}
    for slot in step.inputs.values():
        if slot is not None and slot not in artifacts:
            artifacts[slot] = _result(plan, steps[slot], ctx, artifacts)
    inputs = {name: slot and artifacts[slot] for name, slot in step.inputs.items()}
    return step.stage.run(dataclasses.replace(ctx, slot=step.slot), **inputs)


def _context(plan: Plan, scratch: Path, log: logging.Logger) -> Context:
    import torch

    from pipeline.distributed.process_group import DistContext

    return Context(
        run_dir=scratch,
        seed=plan.recipe.seed,
        dist=DistContext(device=torch.device("cpu")),
        log=log,
        metrics=Metrics(None),
    )


def documents(sample: Sample) -> Iterator[list[Token]]:
    """The tokens of each document in a sample, in order.

    The token behind a document's last position is shown if it is a target; otherwise it is not in
    the sample.
    """
    positions = sample.positions
    starts = [0] if positions is None else (positions == 0).nonzero()[0].tolist()
    for start, stop in zip(starts, [*starts[1:], len(sample.input_ids)], strict=True):
        ids, labels = sample.input_ids[start:stop].tolist(), sample.labels[start:stop].tolist()
        trained = [False, *(label != NO_TARGET for label in labels)]
        if trained[-1]:
            ids.append(labels[-1])
        yield [Token(token, known) for token, known in zip(ids, trained, strict=False)]
