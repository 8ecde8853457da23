"""Samples of a recipe without a run: the data slot and the slots that it needs are run here."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.contracts.data import NO_TARGET, Data, Sample
from pipeline.contracts.model import ModelSource
from pipeline.contracts.sample_order import ENDLESS, Order
from pipeline.contracts.training import TrainedRun
from pipeline.errors import UsageError
from pipeline.execution.in_process import artifact, scratch_context
from pipeline.utils.text import plural

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan, PlannedSlot
    from pipeline.contracts.stage import Context


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
def previews(plan: Plan, log: logging.Logger) -> Iterator[dict[str, Preview]]:
    """Run the recipe's data slots and the slots that they need, in this process only, in a
    temporary run folder; nothing is trained. Yields a preview by slot. Raises UsageError if no slot
    returns data, and the errors of those stages."""
    slots = [planned for planned in plan.slots if _gives(planned, Data)]
    if not slots:
        raise UsageError("no slot of this recipe provides data")
    with scratch_context(log, seed=plan.recipe.seed) as ctx:
        made = _untrained(plan, ctx)
        found = {}
        for planned in slots:
            data = artifact(plan, planned, ctx, made)
            models = [made[slot] for slot in planned.inputs.values() if slot is not None]
            tokenizers = [one.tokenizer() for one in models if isinstance(one, ModelSource)]
            if not tokenizers:
                raise UsageError(f"slot `{planned.slot}` takes no model, so there is no tokenizer")
            found[planned.slot] = Preview(
                data=data, tokenizer=tokenizers[-1], seed=plan.recipe.seed
            )
        yield found


def _untrained(plan: Plan, ctx: Context) -> dict[str, Any]:
    """For each slot that returns the model of a training, that model before it."""
    slots, made = {planned.slot: planned for planned in plan.slots}, dict[str, Any]()
    for planned in plan.slots:
        taken = [slots[slot] for slot in planned.inputs.values() if slot is not None]
        if _gives(planned, ModelSource) and any(_gives(one, TrainedRun) for one in taken):
            (model,) = (one for one in taken if _gives(one, ModelSource))
            made[planned.slot] = artifact(plan, model, ctx, made)
    return made


def _gives(planned: PlannedSlot, kind: type) -> bool:
    return planned.gives is not None and issubclass(planned.gives, kind)


def documents(sample: Sample) -> Iterator[list[Token]]:
    """Yield the tokens of each document in a sample, in order. The token after a document's last
    position is included if it is a target; otherwise the sample does not hold it."""
    positions = sample.positions
    starts = [0] if positions is None else (positions == 0).nonzero()[0].tolist()
    for start, stop in zip(starts, [*starts[1:], len(sample.input_ids)], strict=True):
        ids, labels = sample.input_ids[start:stop].tolist(), sample.labels[start:stop].tolist()
        trained = [False, *(label != NO_TARGET for label in labels)]
        if trained[-1]:
            ids.append(labels[-1])
        yield [Token(token, known) for token, known in zip(ids, trained, strict=False)]
