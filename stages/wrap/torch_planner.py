"""Memory of an engine of plain torch: weights, gradients and optimizer state, by unit."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator

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

ROOT = -1
"""Place of the root, which has the weights outside of blocks."""


class UnitAmounts:
    """An amount, such as bytes, of each unit by place: ROOT, or a block's number."""

    def __init__(self, model: ModelShape, amount: Callable[[Weight], int]) -> None:
        kinds = [[*map(amount, weights)] for weights in (model.root, *model.kinds)]
        self.largest = max(itertools.chain(*kinds), default=0)
        """The largest amount of one weight."""
        sums = [sum(weights) for weights in kinds]
        units = [sums[0], *(sums[kind + 1] for kind in model.blocks)]
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
        """The amount of the blocks after this one."""
        return self.between(place + 1, len(self._before))


class TorchMemory(StrategyMemory):
    """Weights, optimizer state and gradients on every rank, sharded or whole."""

    def __init__(
        self, ranks: int, model: ModelShape, optimizer: OptimizerShape, sizes: Sizes, *,
        shards: int = 1, home: Place = "device",
    ) -> None:  # fmt: skip
        self.ranks = ranks
        self._model, self._optimizer, self._sizes = model, optimizer, sizes
        self._shards, self._home = shards, home
        self._held = UnitAmounts(model, lambda w: w.shard(shards, sizes.of(w)))
        """Bytes of this rank's shards, which are padded."""
        self._own = UnitAmounts(model, lambda w: w.shard(shards, 1) if w.trained else 0)
        """Elements that this rank updates."""
        self.masters = self._own.all, home
        self.updated = optimizer.touched(self._own.all, sizes.master) * (home == "device")
        self._head = sum(w.elements for w in model.root if w.trained and w.name in model.late)
        """Elements of the root's weights whose gradients come before those of blocks."""

    @abstractmethod
    def _reduced(self, moment: Moment) -> int:
        """Elements that have a gradient in the master dtype."""

    @abstractmethod
    def _running(self, moment: Moment, place: int) -> Iterator[Item]:
        """Further items while the unit at this place runs: a block's number, ROOT for the
        embeddings, the number of blocks for the head."""

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
        ends = {"embeddings": ROOT, "head": len(self._model.blocks)}
        return moment.unit if isinstance(moment.unit, int) else ends[moment.unit]
