"""Slots of a recipe that run in this process, without a run; and so the samples of its data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.chain.plan import Plan, PlannedSlot
from pipeline.contracts.data import NO_TARGET, Data, Sample
from pipeline.contracts.metrics import Metrics
from pipeline.contracts.model import ModelSource
from pipeline.contracts.sample_order import ENDLESS, Order
from pipeline.contracts.stage import Context
from pipeline.contracts.training import TrainedRun
from pipeline.errors import UsageError
from pipeline.utils.text import plural


@contextlib.contextmanager
def scratch_context(
    log: logging.Logger, *, seed: int = 0, device: str = "cpu"
) -> Iterator[Context]:
    """Yield the context of stages that run here, with a run folder that is removed afterwards."""
    import torch

    from pipeline.distributed.process_group import DistContext

    with (
        tempfile.TemporaryDirectory(prefix="pipe-show-") as scratch,
        contextlib.ExitStack() as stack,
    ):
        yield Context(
            run_dir=Path(scratch),
            seed=seed,
            dist=DistContext(device=torch.device(device)),
            log=log,
            metrics=Metrics(None),
            on_exit=stack.callback,
        )


def artifact(plan: Plan, planned: PlannedSlot, ctx: Context, made: dict[str, Any]) -> Any:
    """The artifact of a slot. It runs, after the slots that it needs, unless their artifacts have
    been `made`."""
    if planned.slot not in made:
        slots = {each.slot: each for each in plan.slots}
        inputs = {
            name: slot and artifact(plan, slots[slot], ctx, made)
            for name, slot in planned.inputs.items()
        }
        made[planned.slot] = planned.stage.run(
            dataclasses.replace(ctx, slot=planned.slot), **inputs
        )
    return made[planned.slot]


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

    @functools.cached_property
    def _order(self) -> Order:
        return self.data.train.order(self.seed, shuffle=True)

    def indices(self, count: int) -> list[int]:
        """The first samples in the order of a run with `shuffle: true`."""
        return [*map(int, self._order.indices(0, min(count, self._order.size)))]

    @property
    def size(self) -> int | None:
        """Samples to train on; None for a stream."""
        return None if self._order.size == ENDLESS else self._order.size

    def facts(self) -> dict[str, Any]:
        """The numbers of samples to train on and to evaluate on."""
        heldout = len(self.data.heldout) if self.data.heldout else 0
        return {"samples": self.size, "heldout": heldout, "packed": self.data.packed}

    def summary(self) -> str:
        """The same for people."""
        packed = ", packed" if self.data.packed else ""
        size = "a stream of samples" if self.size is None else plural(self.size, "sample")
        return f"{size} to train on{packed}, {self.facts()['heldout']} held out"


@contextlib.contextmanager
def previews(plan: Plan, log: logging.Logger) -> Iterator[dict[str, Preview]]:
    """Run the recipe's data slots and the slots that they need, in this process only, in a
    temporary run folder; nothing is trained: the model of a training is taken as it was before.
    Yields a preview by slot. Raises UsageError if no slot returns data, and the errors of those
    stages."""
    slots, made = {planned.slot: planned for planned in plan.slots}, dict[str, Any]()

    def giving(kind: type, names: Iterable[str | None]) -> list[PlannedSlot]:
        given = (slots[name] for name in names if name is not None)
        return [one for one in given if issubclass(one.gives or object, kind)]

    if not giving(Data, slots):
        raise UsageError("no slot of this recipe provides data")
    with scratch_context(log, seed=plan.recipe.seed) as ctx:
        for planned in giving(ModelSource, slots):
            inputs = planned.inputs.values()
            if giving(TrainedRun, inputs):
                (model,) = giving(ModelSource, inputs)
                made[planned.slot] = artifact(plan, model, ctx, made)
        found = {}
        for planned in giving(Data, slots):
            data = artifact(plan, planned, ctx, made)
            models = giving(ModelSource, planned.inputs.values())
            if not models:
                raise UsageError(f"slot `{planned.slot}` takes no model, so there is no tokenizer")
            tokenizer = made[models[-1].slot].tokenizer()
            found[planned.slot] = Preview(data=data, tokenizer=tokenizer, seed=plan.recipe.seed)
        yield found


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
