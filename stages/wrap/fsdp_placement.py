"""What wrap.fsdp holds, and when, by the source of torch.distributed.fsdp.fully_shard (2.13)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pipeline.forecast.ledger import Ledger, Place
from pipeline.forecast.placement import (
    BUFFERS,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    UPDATE,
    WHOLE_GRADIENTS,
    Copies,
    Placement,
    Traffic,
    Unit,
)
from pipeline.forecast.shapes import ModelShape, OptimizerShape, Weight
from pipeline.forecast.sizes import Sizes
from pipeline.forecast.tape import Tape, Value


class FsdpPlacement(Placement):
    """Shards of everything; units gathered for as long as they run.

    A gathered unit is copied out of the buffer that the all-gather fills, so both exist for a
    moment: in forward until the next unit is gathered, in backward not at all longer. Backward
    gathers a unit ahead. Gradients stay whole, in the compute dtype, until their unit's backward is
    through; the buffer that is reduced, in the reduce dtype, lives until the next unit's is needed.
    """

    casts_inputs = True

    def __init__(
        self,
        ledger: Ledger,
        model: ModelShape,
        optimizer: OptimizerShape,
        sizes: Sizes,
        *,
        ranks: int,
        shards: int,
        replicated: bool,
        reshard: bool,
        reduce_always: bool,
        offload: bool,
        forward_ahead: int,
        backward_ahead: int,
    ) -> None:
        self.ledger = ledger
        self.ranks = ranks
        self._shards = shards
        self._replicated = replicated
        """Whether shards are reduced over replicas too, be it one."""
        self._units: dict[Unit, Sequence[Weight]] = {None: model.root}
        self._units |= {place: block.weights for place, block in enumerate(model.blocks)}
        self._owner = {w: unit for unit, weights in self._units.items() for w in weights}
        self._optimizer = optimizer
        self._sizes = sizes
        self._reshard = reshard
        self._reduce_always = reduce_always
        self._home: Place = "host" if offload else "device"
        """Where shards are."""
        self._reduces = True
        self._gathered: set[Unit] = set()
        self._whole: dict[Unit, int] = {}
        self._graded: dict[Weight, bool] = {}
        """Weights whose gradient this backward has computed -> whether it is a view."""
        self._accumulated: set[Unit] = set()
        """Units whose whole gradients of earlier backwards are kept."""
        self._adds_at_once = sizes.reduce == sizes.compute
        """Whether what is kept is the parameter's own gradient, to which autograd adds; otherwise
        it is a cast copy, to which the unit's gradients are added when all are there."""
        self._tied = model.tied
        self._left = 0
        """Bytes of the forward buffer that waits for the next."""
        self._forward_ahead, self._backward_ahead = forward_ahead, backward_ahead
        """How many units are gathered ahead."""
        self._ahead: dict[Unit, int] = {}
        """Units that are being gathered ahead -> bytes of their buffers."""
        self._scattering = 0
        self._reducing = 0
        """Bytes of shards that are reduced over replicas, which stay until backward is over."""
        self._sharded: set[Unit] = set()
        """Units that have gradients."""
        self._started = False

    def load(self) -> None:
        self._explain()
        self.ledger.change(PARAMETERS, sum(map(self._parameters, self._units)), self._home)

    def _explain(self) -> None:
        every = [weight for weights in self._units.values() for weight in weights]
        own = sum(weight.elements for weight in every if not weight.borrowed)
        lent = sum(weight.elements for weight in every if weight.borrowed)
        trained = sum(weight.elements for weight in every if weight.trained)
        sizes, shards, tell = self._sizes, self._shards, self.ledger.explain
        parts = [f"{sizes.master} bytes x {own / 1e9:.4g} G"] if own else []
        parts += [f"what is borrowed of {lent / 1e9:.4g} G"] if lent else []
        tell(PARAMETERS, f"({' + '.join(parts)}) / {shards} shards, each matrix by rows")
        tell(GRADIENTS, f"{sizes.master} bytes x {trained / 1e9:.4g} G trained / {shards} shards")
        bits = self._optimizer.bits
        tell(OPTIMIZER, f"{bits / 8:.4g} bytes x {trained / 1e9:.4g} G trained / {shards} shards")
        tell(GATHERED, f"{sizes.compute} bytes x units that are gathered: the root, blocks in use")
        tell(
            BUFFERS,
            f"{sizes.compute} bytes x the unit that is gathered next, {sizes.reduce} bytes x the "
            "one whose gradients are reduced",
        )
        tell(WHOLE_GRADIENTS, f"{sizes.compute} bytes x the root and the block in backward")
        tell(UPDATE, "what the optimizer's kernel takes")

    def _parameters(self, unit: Unit) -> int:
        weights = self._units[unit]
        return sum(self._shard([weight], self._size(weight)) for weight in weights)

    def _size(self, weight: Weight) -> int:
        return self._sizes.compute if weight.borrowed else self._sizes.master

    def _shard(self, weights: Sequence[Weight], size: int) -> int:
        """Bytes of the first rank's rows, which are the most."""
        return sum(weight.shard(self._shards, size) for weight in weights)

    def begin(self, *, last: bool) -> None:
        self._reduces = last or self._reduce_always

    def use(self, tape: Tape, weight: Weight, size: int) -> Value:
        def leaf(gradient: Value) -> None:
            unit = self._owner[weight]
            if weight in self._graded:  # of a tied one, which is added
                tape.pulse(gradient.bytes if self._graded[weight] else 0, gradient.item)
                tape.drop(gradient)
                return
            if unit in self._accumulated and self._adds_at_once and weight is not self._tied:
                tape.drop(gradient)
                return
            self._graded[weight] = gradient.shared
            # What was computed is kept as it is.
            self.ledger.change(gradient.item, -gradient.bytes)
            self.ledger.change(WHOLE_GRADIENTS, gradient.bytes)
            self._whole[unit] = self._whole.get(unit, 0) + gradient.bytes

        return Value(0, GATHERED, graded=weight.trained, leaf=leaf)

    def _gather(self, unit: Unit) -> int:
        """Fill a buffer with a unit, after the cast of what this rank has of it; its bytes. Nothing
        where there is nobody to gather from."""
        if self._shards == 1:
            return 0
        buffer = self._whole_unit(unit)
        self.ledger.change(BUFFERS, buffer)
        cast = [weight for weight in self._units[unit] if self._is_copied(weight)]
        self.ledger.pulse(BUFFERS, self._shard(cast, self._sizes.compute))
        return buffer

    def _is_copied(self, weight: Weight) -> bool:
        """Whether what is sent of it is not its shard itself."""
        return self._home == "host" or self._size(weight) != self._sizes.compute

    def _open(self, unit: Unit) -> None:
        self._gathered.add(unit)
        self.ledger.change(GATHERED, self._whole_unit(unit))

    def _close(self, unit: Unit) -> None:
        if unit in self._gathered:
            self._gathered.discard(unit)
            self.ledger.change(GATHERED, -self._whole_unit(unit))

    def _whole_unit(self, unit: Unit) -> int:
        """Every matrix in as many rows as shards have together."""
        return self._shard(self._units[unit], self._sizes.compute) * self._shards

    def before_forward(self, unit: Unit) -> None:
        if unit in self._gathered:
            return
        buffer = self._arrived(unit)
        self._open(unit)
        self.ledger.change(BUFFERS, -self._left)
        self._left = buffer
        if unit is not None:
            self._gather_ahead(range(unit + 1, unit + 1 + self._forward_ahead))

    def _arrived(self, unit: Unit) -> int:
        """The buffer of a unit that is needed now; its bytes."""
        if unit in self._ahead:
            return self._ahead.pop(unit)
        return self._gather(unit)

    def _gather_ahead(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit in self._units and unit not in self._gathered and unit not in self._ahead:
                self._ahead[unit] = self._gather(unit)

    def after_forward(self, unit: Unit) -> None:
        if unit is None:
            self.ledger.change(BUFFERS, -self._left)
            self._left = 0
        elif self._reshard:
            self._close(unit)

    def backward_at_output(self) -> None:
        # The root gathers one unit ahead, however many the others do.
        last = len(self._units) - 2
        self._gather_ahead([last])

    def before_backward(self, unit: Unit) -> None:
        if unit is None:
            return
        if unit not in self._gathered:
            buffer = self._arrived(unit)
            self._open(unit)
            self.ledger.change(BUFFERS, -buffer)
        self._gather_ahead(range(unit - 1, unit - 1 - self._backward_ahead, -1))

    def after_backward(self, unit: Unit) -> None:
        whole = self._whole.pop(unit, 0)
        for weight in self._units[unit]:
            self._graded.pop(weight, None)
        trained = [weight for weight in self._units[unit] if weight.trained]
        if unit in self._accumulated:  # to which it is added in place
            self.ledger.change(WHOLE_GRADIENTS, -whole)
            whole = sum(weight.elements for weight in trained) * self._sizes.reduce
        self._close(unit)
        if not self._reduces:
            self._accumulate(unit, trained)
            return
        self.ledger.change(BUFFERS, -self._scattering)
        mine = self._shard(trained, self._sizes.reduce)
        self._scattering = mine * self._shards
        self.ledger.change(BUFFERS, self._scattering)
        # A variable of the function that reduces still holds the last gradient.
        kept = unit in self._accumulated
        size = self._sizes.reduce if kept else self._sizes.compute
        held = trained[-1:] if self._shards > 1 else []
        last = sum(weight.elements for weight in held) * size
        self.ledger.change(WHOLE_GRADIENTS, last - whole)
        self._accumulated.discard(unit)
        self._keep(unit, trained, mine)
        self.ledger.change(WHOLE_GRADIENTS, -last)
        if unit is None:
            self.ledger.change(BUFFERS, -self._scattering - self._reducing)
            self._scattering = self._reducing = 0

    def _accumulate(self, unit: Unit, trained: Sequence[Weight]) -> None:
        """Keep a unit's gradients whole, in the reduce dtype."""
        if unit not in self._accumulated and not self._adds_at_once:
            for weight in trained:
                self.ledger.change(WHOLE_GRADIENTS, weight.elements * self._sizes.reduce)
                self.ledger.change(WHOLE_GRADIENTS, -weight.elements * self._sizes.compute)
        self._accumulated.add(unit)

    def _keep(self, unit: Unit, trained: Sequence[Weight], reduced: int) -> None:
        """The gradient's shard, in the master dtype, is added to what there is."""
        own = self._shard(trained, self._sizes.master)
        moved = self._sizes.master != self._sizes.reduce or self._home == "host"
        added = unit in self._sharded
        # What was reduced over replicas stays, and if it is no gradient itself, beside them.
        stays = self._replicated and (moved or added)
        if stays:
            self.ledger.change(BUFFERS, reduced)
            self._reducing += reduced
        else:
            self.ledger.change(GRADIENTS, reduced)
        if moved:
            self.ledger.change(GRADIENTS, own, self._home)
            if not stays:
                self.ledger.change(GRADIENTS, -reduced)
        if added and (moved or not stays):
            self.ledger.change(GRADIENTS, -own, self._home)
        self._sharded.add(unit)

    def step(self) -> None:
        counts = [
            self._shard([w], 1) for weights in self._units.values() for w in weights if w.trained
        ]
        if not self._started:
            self.ledger.change(OPTIMIZER, self._optimizer.state(sum(counts)), self._home)
            self._started = True
        taken = self._optimizer.update(counts, self._sizes.master)
        self.ledger.pulse(UPDATE, taken, self._home)
        self.ledger.change(GRADIENTS, -sum(counts) * self._sizes.master, self._home)
        self._sharded.clear()

    @property
    def masters(self) -> tuple[int, Place]:
        trained = [w for weights in self._units.values() for w in weights if w.trained]
        return self._shard(trained, 1), self._home

    @property
    def updated(self) -> int:
        elements, place = self.masters
        return self._optimizer.touched(elements, self._sizes.master) if place == "device" else 0

    @property
    def reach(self) -> int:
        return max(1, self._forward_ahead, self._backward_ahead)

    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        every = [weight for weights in self._units.values() for weight in weights]
        root = self._shard(self._units[None], self._sizes.compute) * self._shards
        gathered = self._shard(every, self._sizes.compute) * self._shards
        trained = self._shard([w for w in every if w.trained], self._sizes.reduce) * self._shards
        reductions = self._reductions(microbatches)
        if self._shards > 1:
            # What is not given up after forward is not gathered again.
            again = gathered - root if self._reshard else 0
            yield Traffic(
                collective="all-gather",
                bytes=(gathered + again) * microbatches,
                ranks=self._shards,
                what="parameters",
            )
            yield Traffic(
                collective="reduce-scatter",
                bytes=trained * reductions,
                ranks=self._shards,
                what="gradients",
            )
        if self.ranks > self._shards:
            yield Traffic(
                collective="all-reduce",
                bytes=trained // self._shards * reductions,
                ranks=self.ranks // self._shards,
                apart=self._shards,
                what="gradients' shards",
            )

    def copies(self, microbatches: int) -> Copies:
        if self._home == "device":
            return Copies()
        units = sum(map(self._parameters, self._units))
        again = units - self._parameters(None) if self._reshard else 0
        every = (weight for weights in self._units.values() for weight in weights)
        trained = [weight for weight in every if weight.trained]
        return Copies(
            # Shards are cast when they are there, gradients before.
            up=(units + again) * microbatches,
            down=self._shard(trained, self._sizes.master) * self._reductions(microbatches),
        )

    def _reductions(self, microbatches: int) -> int:
        return microbatches if self._reduce_always else 1
