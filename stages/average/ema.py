"""The stage `average.ema`: an exponential moving average of the weights, kept while training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Lt

from pipeline import Checkpoints, Context, Engine, PlanView, Problem

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
        from stages.average.ema_engine import EmaEngine

        return EmaEngine(engine, decay=self.decay, evaluate=self.evaluate)
