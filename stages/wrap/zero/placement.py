"""What wrap.zero holds, and when: the closed form of `memory` as a strategy's part of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.artifacts import Precision
from pipeline.forecast.ledger import Ledger, Place
from pipeline.forecast.placement import WHOLE_GRADIENTS, Copies, Placement, Traffic, Unit
from pipeline.forecast.shapes import ModelShape, OptimizerShape
from pipeline.forecast.shapes import Weight as Declared
from pipeline.forecast.tape import Tape, Value
from stages.wrap.zero import memory
from stages.wrap.zero.copies import copies
from stages.wrap.zero.kernels import uses_deepspeed_kernel
from stages.wrap.zero.memory import Gradients, Item, Moment, Setting, Weight, Weights

if TYPE_CHECKING:
    from stages.wrap.zero.stage import Zero

KERNEL_MOMENTS = 8
"""Bytes of an element's moments in DeepSpeed's kernels, which keep them in fp32."""


class ZeroPlacement(Placement):
    """At every turn of a step, what the closed form says replaces what it said before. Gradients of
    the unit in backward are added as they come."""

    def __init__(
        self,
        ledger: Ledger,
        stage: Zero,
        model: ModelShape,
        precision: Precision,
        optimizer: OptimizerShape,
        *,
        ranks: int,
    ) -> None:
        self.ledger = ledger
        self.ranks = ranks
        self._stage = stage
        self._model = model
        self._optimizer = optimizer
        self._weights = _weights(model, precision)
        moments = round(optimizer.bits / 8)
        if uses_deepspeed_kernel(stage, optimizer.algorithm):
            moments = KERNEL_MOMENTS
        self._setting = Setting(
            stage=stage,
            world=ranks,
            compute=precision.compute,
            master=precision.master,
            reduce=precision.reduce,
            moment_bytes=moments,
        )
        self._gradients: Gradients = memory.gradients(self._setting, self._weights)
        self._held: dict[tuple[str, Place], int] = {}
        self._own = 0
        """Bytes of gradients that the unit in backward has left behind."""
        self._accumulating = False
        self._begun = False
        """Whether this backward has computed gradients."""
        self._last = len(model.blocks) - 1

    def load(self) -> None:
        self._turn(memory.held(self._setting, self._weights, "load"))

    def begin(self, *, last: bool) -> None:
        self._final = last

    def use(self, tape: Tape, weight: Declared, size: int) -> Value:
        def leaf(made: Value) -> None:
            if not self._begun:  # which is when DeepSpeed allocates its bucket
                self._begun = True
                self._at("backward", "head")
            tape.drop(made)
            if weight is self._model.tied:
                return  # of a tied head, which the closed form counts
            kept = weight.elements * self._gradients.kept
            self.ledger.change(WHOLE_GRADIENTS, kept)
            self._own += kept
            self.ledger.pulse(WHOLE_GRADIENTS, weight.elements * self._gradients.passing)

        return Value(0, WHOLE_GRADIENTS, graded=weight.trained, leaf=leaf)

    def before_forward(self, unit: Unit) -> None:
        self._at("forward", "embeddings" if unit is None else unit)

    def after_forward(self, unit: Unit) -> None:
        if unit == self._last:
            self._at("forward", "head")
        elif unit is None:
            self._at("loss", "head")

    def before_backward(self, unit: Unit) -> None:
        if unit == self._last:
            self._at("reduce", "head")
        self._begun = unit is not None
        self._at("begin" if unit is None else "backward", "head" if unit is None else unit)

    def after_backward(self, unit: Unit) -> None:
        place: memory.Place = "embeddings" if unit is None else unit
        self._reduce(place)
        if unit == 0:
            self._at("backward", "embeddings")
        if unit is None:
            self._accumulating = True
            self._at("forward" if not self._final else "between", "embeddings")

    def _reduce(self, place: memory.Place) -> None:
        self.ledger.change(WHOLE_GRADIENTS, -self._own)
        self._own = 0
        self._at("reduce", place)

    def step(self) -> None:
        self._at("step", "head")
        self._accumulating = False
        self._at("between", "head")

    def _at(self, moment: Moment, place: memory.Place) -> None:
        if moment == "backward" and place != "head":
            self.ledger.change(WHOLE_GRADIENTS, -self._own)
            self._own = 0
        self._turn(
            memory.held(
                self._setting,
                self._weights,
                moment,
                place=place,
                accumulating=self._accumulating and moment != "step",
            )
        )

    def _turn(self, items: list[Item]) -> None:
        """Hold these items, and what was held before no more; what is less first."""
        new: dict[tuple[str, Place], int] = {}
        for item in items:
            new[item.name, item.where] = new.get((item.name, item.where), 0) + item.bytes
            self.ledger.explain(item.name, self._legend(item.formula))
        names = {**self._held, **new}
        changes = {key: new.get(key, 0) - self._held.get(key, 0) for key in names}
        for (name, place), amount in sorted(changes.items(), key=lambda one: one[1]):
            self.ledger.change(name, amount, place)
        self._held = new

    def _legend(self, formula: str) -> str:
        if "N" not in formula:
            return formula
        return f"{formula} bytes, N = {self._trained / 1e9:.3g} G trained, W = {self.ranks} ranks"

    @property
    def masters(self) -> tuple[int, Place]:
        at = self._setting.state_at
        return self._setting.share(self._trained), "host" if at == "disk" else at

    @property
    def updated(self) -> int:
        if self._stage.offload_optimizer is not None:
            return 0
        part = self._setting.share(self._trained)
        return self._optimizer.touched(part, self._setting.master_bytes)

    @property
    def _trained(self) -> int:
        return sum(self._weights.trained)

    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        if self.ranks == 1:
            return
        s, sharded = self._setting, self._stage.stage == 3
        gathered = self._trained
        if sharded:
            gathered = memory.gathers(s, self._weights, microbatches)
        reductions = microbatches if self._stage.stage > 1 else 1
        yield Traffic(
            # Stages 1 and 2 give all ranks all of it (use_multi_rank_bucket_allreduce).
            collective="reduce-scatter" if sharded else "all-reduce",
            bytes=s.reduce_bytes * self._trained * reductions,
            ranks=self.ranks,
            what="gradients",
        )
        yield Traffic(
            collective="all-gather",
            bytes=s.compute_bytes * gathered,
            ranks=self.ranks,
            what="parameters",
        )

    def copies(self, microbatches: int) -> Copies:
        return copies(self._setting, self._weights, microbatches)


def _weights(model: ModelShape, precision: Precision) -> Weights:
    """The model as the closed form knows it; what is packed counts in numbers of the compute
    dtype."""
    size = memory.BYTES[precision.compute]

    def weight(declared: Declared) -> Weight:
        elements = declared.bytes(size) // size
        return Weight(elements=elements, trained=declared.trained)

    return Weights(
        blocks=tuple(tuple(map(weight, block.weights)) for block in model.blocks),
        root=tuple(map(weight, model.root)),
        tied=model.tied is not None,
    )
