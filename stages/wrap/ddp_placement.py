"""What wrap.ddp holds, and when (torch's DistributedDataParallel, and the cast of compute_cast)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipeline.forecast.ledger import Ledger, Place
from pipeline.forecast.placement import (
    BUFFERS,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    UPDATE,
    Placement,
    Traffic,
    Unit,
)
from pipeline.forecast.shapes import ModelShape, OptimizerShape, Weight
from pipeline.forecast.sizes import Sizes
from pipeline.forecast.tape import GRADIENTS as PASSING
from pipeline.forecast.tape import Tape, Value
from stages.wrap.ddp_buckets import cut


@dataclass(frozen=True)
class Bucket:
    """Weights whose gradients are reduced together, and those of them that have one."""

    weights: Sequence[Weight]
    here: set[Weight] = field(default_factory=set)

    @functools.cached_property
    def elements(self) -> int:
        """How many numbers it holds."""
        return sum(weight.elements for weight in self.weights)


class DdpPlacement(Placement):
    """A replica of everything.

    The buckets that are reduced are there from the start to the end. Gradients are views of them,
    or tensors of their own beside them. Where weights are cast for use, a module's forward makes
    the copies, and what backward needs of them stays until it has run. A bucket is cast to be
    reduced in another dtype.
    """

    def __init__(
        self,
        ledger: Ledger,
        model: ModelShape,
        optimizer: OptimizerShape,
        sizes: Sizes,
        *,
        ranks: int,
        views: bool,
        bucket: int,
    ) -> None:
        """`bucket` is what one holds, in bytes."""
        self.ledger = ledger
        self.ranks = ranks
        self._optimizer = optimizer
        self._sizes = sizes
        self._views = views
        self._weights = tuple(model.weights())
        self._started = False
        self._apart: set[Weight] = set()
        """Whose gradients are tensors of their own."""
        self._tied = model.tied
        self._waiting: tuple[Tape, Weight, Value] | None = None
        """What backward has so far of the tied weight's gradient, and on what tape."""
        self._reduces = True
        self._blocks = len(model.blocks)
        trained = [weight for weight in _ordered(model) if weight.trained]
        cuts = cut(trained, lambda weight: weight.bytes(sizes.master), bucket)
        self._bucket = {weight: one for one in map(Bucket, cuts) for weight in one.weights}

    @property
    def _trained(self) -> int:
        return sum(weight.elements for weight in self._weights if weight.trained)

    def load(self) -> None:
        held = (w.bytes(self._size(w)) for w in self._weights)
        self.ledger.change(PARAMETERS, sum(held))
        self.ledger.change(GRADIENTS, self._trained * self._sizes.master)
        gradients = [w.elements for w in self._weights if w.trained]
        settled = max(gradients, default=0) if self._views else sum(gradients)
        self.ledger.pulse(BUFFERS, settled * self._sizes.master)
        self._explain()

    def _explain(self) -> None:
        own = sum(w.elements for w in self._weights if not w.borrowed)
        lent = sum(w.elements for w in self._weights if w.borrowed)
        sizes, trained, tell = self._sizes, self._trained, self.ledger.explain
        parts = [f"{sizes.master} bytes x {own / 1e9:.4g} G"] if own else []
        parts += [f"what is borrowed of {lent / 1e9:.4g} G"] if lent else []
        tell(PARAMETERS, " + ".join(parts))
        beside = "" if self._views else ", and once more beside the buckets"
        tell(GRADIENTS, f"{sizes.master} bytes x {trained / 1e9:.4g} G trained, in buckets{beside}")
        tell(OPTIMIZER, f"{self._optimizer.bits / 8:.4g} bytes x {trained / 1e9:.4g} G trained")
        tell(GATHERED, f"copies in {sizes.compute} bytes of weights that backward will need")
        settled = "the largest gradient" if self._views else "all gradients"
        tell(BUFFERS, f"{settled}, once, when buckets are laid out")
        tell(UPDATE, "what the optimizer's kernel takes")

    def _size(self, weight: Weight) -> int:
        return self._sizes.compute if weight.borrowed else self._sizes.master

    @property
    def reach(self) -> int:
        # Buckets end where no block does.
        return self._blocks if self._narrow else 1

    @property
    def _narrow(self) -> bool:
        """Whether gradients are reduced in another dtype than they are kept in."""
        return self._sizes.reduce != self._sizes.master

    def begin(self, *, last: bool) -> None:
        self._reduces = last

    def use(self, tape: Tape, weight: Weight, size: int) -> Value:
        def leaf(made: Value) -> None:
            if weight is not self._tied:
                self._add(tape, weight, made)
            elif self._waiting is None:
                self._waiting = tape, weight, made
            else:
                *_, waiting = self._waiting
                tape.pulse(made.bytes if waiting.shared else 0, made.item)
                tape.drop(made)

        own = Value(0, GATHERED, graded=weight.trained, leaf=leaf)
        if self._size(weight) == size:
            return own
        cast = tape.make(weight.bytes(size), GATHERED, graded=weight.trained)

        def back(upstream: Value) -> list[tuple[Value, Value | None]]:
            return [(own, tape.make(weight.elements * self._sizes.master, PASSING))]

        return tape.node(cast, [], back)

    def after_backward(self, unit: Unit) -> None:
        if unit is None and self._waiting is not None:
            self._add(*self._waiting)
            self._waiting = None

    def _add(self, tape: Tape, weight: Weight, made: Value) -> None:
        """Add a gradient to what there is of it."""
        size = weight.elements * self._size(weight)
        if weight not in self._apart and not self._views:
            self.ledger.change(made.item, -made.bytes)  # it is this tensor
            self.ledger.change(GRADIENTS, size)
            self._apart.add(weight)
        else:
            tape.drop(made)
        if self._reduces and self._narrow:
            self._reduce(weight)

    def _reduce(self, weight: Weight) -> None:
        """A gradient is there; the last of a bucket's has the bucket reduced."""
        bucket = self._bucket[weight]
        bucket.here.add(weight)
        if len(bucket.here) == len(bucket.weights):
            bucket.here.clear()
            self.ledger.pulse(BUFFERS, bucket.elements * self._sizes.reduce)

    def step(self) -> None:
        if not self._started:
            self.ledger.change(OPTIMIZER, self._optimizer.state(self._trained))
            self._started = True
        counts = [weight.elements for weight in self._weights if weight.trained]
        self.ledger.pulse(UPDATE, self._optimizer.update(counts, self._sizes.master))
        self.ledger.change(GRADIENTS, -sum(w.elements * self._size(w) for w in self._apart))
        self._apart.clear()

    @property
    def masters(self) -> tuple[int, Place]:
        return self._trained, "device"

    @property
    def updated(self) -> int:
        return self._optimizer.touched(self._trained, self._sizes.master)

    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        if self.ranks > 1:
            yield Traffic(
                collective="all-reduce",
                bytes=self._trained * self._sizes.reduce,
                ranks=self.ranks,
                what="gradients",
            )


def _ordered(model: ModelShape) -> Iterator[Weight]:
    """Weights in module order, nearly: the embedding, the blocks, what follows them."""
    first, *rest = model.root
    yield first
    for block in model.blocks:
        yield from block.weights
    yield from rest
