"""The stage `average.ema`: an exponential moving average of the weights, kept while training."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt, Lt

from pipeline import (
    WEIGHT,
    Checkpoints,
    Context,
    Engine,
    EngineState,
    Fragment,
    LossParts,
    Measure,
    MicroBatch,
    Objective,
    PlanView,
    Problem,
    StepGuard,
    StepReport,
    Unit,
)

if TYPE_CHECKING:
    from torch import Tensor

EMA = "ema"
"""Kind of state in checkpoints."""
ELEMENT = 4
"""Bytes of an element of the average, in fp32."""


@dataclass(frozen=True, kw_only=True)
class EmaAverage:
    """Keep an exponential moving average of the trained weights (Polyak & Juditsky 1992): after
    each update, average = decay x average + (1 - decay) x weight, from the initial weights on.

    The slot stands between wrap and checkpoint, and works under every strategy. Each rank keeps the
    average of its part of the master weights, in fp32, on the masters' device: 4 bytes per
    element. (With masters on NVMe, every update reads them once more.)
    Checkpoints hold the average, so a resume continues it exactly, on any strategy and number of
    processes; from a checkpoint without one, it starts from that checkpoint's weights.
    `weights: ema` in the consolidate slot exports it.
    """

    decay: Annotated[float, Gt(0), Lt(1)] = 0.999
    """Share of the average that is kept at an update; it covers about 1 / (1 - decay) updates."""

    evaluate: bool = True
    """Evaluate the average on held-out samples, instead of the weights. An evaluation keeps a copy
    of the rank's part of the weights."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        wires, own = plan.wiring, plan.slot(self)
        for reader in wires.readers(own):
            saving = wires.producer(reader, Checkpoints)
            if saving is not None and own not in wires.producers(saving, Engine):
                message = "the checkpoint slot comes before this one and would not save the average"
                yield Problem(message=message, hint="put this slot between wrap and checkpoint")

    def run(self, ctx: Context, engine: Engine) -> Engine:
        return EmaEngine(engine, decay=self.decay, evaluate=self.evaluate)


class EmaEngine(Engine):
    """Keeps the average of another engine's fragments, whose order and spans never change."""

    def __init__(self, inner: Engine, *, decay: float, evaluate: bool) -> None:
        self.parts = inner.parts
        self.device = inner.device
        self.data_axis = inner.data_axis
        self.random_stream, self.random_streams = inner.random_stream, inner.random_streams
        self._engine = inner
        self._decay = decay
        self._evaluate = evaluate
        self._trained = frozenset(inner.state().updates)
        self._averages = self._copies()
        self._is_stale = False

    def accumulate(
        self, batches: Iterable[MicroBatch], objective: Objective, *, counts: Mapping[Unit, float]
    ) -> LossParts:
        return self._engine.accumulate(batches, objective, counts=counts)

    def evaluate(self, batches: Iterable[MicroBatch], measure: Measure) -> Generator[Tensor | None]:
        if not self._evaluate:
            yield from self._engine.evaluate(batches, measure)
            return
        weights = self._copies(fp32=False)
        self._put(self._averages)
        try:
            yield from self._engine.evaluate(batches, measure)
        finally:
            self._put(weights)

    def step(
        self, *, lr_scales: Sequence[float], should_step: StepGuard | None = None
    ) -> StepReport:
        report = self._engine.step(lr_scales=lr_scales, should_step=should_step)
        if report.applied:
            for part in self.fragments():
                if EMA in part.state:
                    part.state[EMA].lerp_(part.state[WEIGHT].float(), 1 - self._decay)
        return report

    def describe(self) -> Mapping[str, Any]:
        return {**self._engine.describe(), "ema_decay": self._decay}

    def state(self) -> EngineState:
        return dataclasses.replace(self._engine.state(), averages=(EMA,))

    def fragments(self) -> Iterator[Fragment]:
        return self._extended(self._engine.fragments())

    def restore(self, state: EngineState) -> Iterator[Fragment]:
        self._is_stale = EMA not in state.averages
        fragments = self._engine.restore(state)
        return fragments if self._is_stale else self._extended(fragments)

    def sync_compute_weights(self) -> None:
        self._engine.sync_compute_weights()
        if self._is_stale:
            self._averages = self._copies()
            self._is_stale = False

    def close(self) -> None:
        """Release the average and all else; the slot that made the inner engine closes it."""
        vars(self).clear()

    def _copies(self, *, fp32: bool = True) -> list[Tensor]:
        """Copies of this rank's part of each trained weight, in the order of fragments."""
        import torch

        parts = (part for part in self._engine.fragments() if part.name in self._trained)
        weights = (part.state[WEIGHT] for part in parts)
        return [w.to(torch.float32 if fp32 else w.dtype, copy=True) for w in weights]

    def _put(self, values: list[Tensor]) -> None:
        """Replace the trained weights by these values (collective)."""
        kept = iter(values)
        for part in self._engine.restore(self._engine.state()):
            if part.name in self._trained:
                part.state[WEIGHT].copy_(next(kept))
        self._engine.sync_compute_weights()

    def _extended(self, fragments: Iterator[Fragment]) -> Iterator[Fragment]:
        """The fragments with the average in the state of the trained ones."""
        kept = iter(self._averages)
        for part in fragments:
            average = {EMA: next(kept)} if part.name in self._trained else {}
            yield dataclasses.replace(part, state={**part.state, **average})
