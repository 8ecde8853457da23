"""Memory of an engine of plain torch: weights, gradients and optimizer state, by unit."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator

from pipeline.planning import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    UPDATE_TEMPORARIES,
    Item,
    ModelShape,
    Moment,
    OptimizerShape,
    Place,
    Sizes,
    StrategyMemory,
    Weight,
)

ROOT, EMBEDDINGS = -2, -1
"""Places of the root, which has the weights outside of other units, and of the embeddings."""
Ends = tuple[Collection[str], Collection[str]]
"""Names of the weights of the embeddings and of the head, where those are units; empty where their
weights are in the root."""


class UnitAmounts:
    """An amount, such as bytes, of each unit by place: ROOT, EMBEDDINGS, a block's number, or their
    number for the head."""

    def __init__(
        self, model: ModelShape, amount: Callable[[Weight], int], ends: Ends = ((), ())
    ) -> None:
        names = [*ends[0], *ends[1]]
        root = [weight for weight in model.root if weight.name not in names]
        parts = [[one for one in model.root if one.name in end] for end in ends]
        kinds = [[*map(amount, weights)] for weights in (root, *parts, *model.kinds)]
        self.largest = max(itertools.chain(*kinds), default=0)
        """The largest amount of one weight."""
        sums = [sum(weights) for weights in kinds]
        units = [*sums[:2], *(sums[kind + 3] for kind in model.blocks), sums[2]]
        self._before = [0, *itertools.accumulate(units)]
        self.all = self._before[-1]

    def __getitem__(self, place: int) -> int:
        return self.between(place, place + 1)

    def between(self, first: int, end: int) -> int:
        """The amount of the units in [first, end); places outside of the model count 0."""
        most = len(self._before) - 1
        low, high = (min(max(place - ROOT, 0), most) for place in (first, end))
        return self._before[max(low, high)] - self._before[low]

    def after(self, place: int) -> int:
        """The amount of the blocks after this one, and of the head."""
        return self.between(max(place, EMBEDDINGS) + 1, len(self._before))


class TorchMemory(StrategyMemory):
    """Weights, optimizer state and gradients on every rank, sharded or whole."""

    def __init__(
        self, ranks: int, model: ModelShape, optimizer: OptimizerShape, sizes: Sizes, *,
        shards: int = 1, home: Place = "device", ends: Ends = ((), ()),
    ) -> None:  # fmt: skip
        self.ranks = ranks
        self._model, self._optimizer, self._sizes = model, optimizer, sizes
        self._shards, self._home = shards, home
        self._held = UnitAmounts(model, lambda w: w.shard(shards, sizes.of(w)), ends)
        """Bytes of this rank's shards, which are padded."""
        self._own = UnitAmounts(model, lambda w: w.shard(shards, 1) if w.trained else 0, ends)
        """Elements that this rank updates."""
        self.masters = self._own.all, home
        self.updated = optimizer.touched(self._own.all, sizes.master) * (home == "device")
        late = {*model.late}.difference(*ends)
        self._head = sum(w.elements for w in model.root if w.trained and w.name in late)
        """Elements of the root's weights whose gradients come before those of blocks."""

    @abstractmethod
    def _reduced(self, moment: Moment) -> int:
        """Elements that have a gradient in the master dtype."""

    @abstractmethod
    def _running(self, moment: Moment, place: int) -> Iterator[Item]:
        """Further items while the unit at this place runs (see `UnitAmounts`)."""

    def held(self, moment: Moment) -> Iterator[Item]:
        m, home = self._sizes.master, self._home
        yield Item(PARAMETERS, home, self._held.all)
        yield Item(GRADIENTS, home, m * self._reduced(moment))
        if moment.event == "load":
            return
        yield Item(OPTIMIZER, home, self._optimizer.state(self._own.all))
        if moment.event == "step":
            yield Item(UPDATE_TEMPORARIES, home, self._optimizer.update(self._own.largest))
        elif moment.event != "between":
            yield from self._running(moment, self._place(moment))

    def _place(self, moment: Moment) -> int:
        ends = {"embeddings": EMBEDDINGS, "head": len(self._model.blocks)}
        return moment.unit if isinstance(moment.unit, int) else ends[moment.unit]
