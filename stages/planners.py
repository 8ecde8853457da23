"""Small planners: samples, precision, adapters, averages, checkpoints and exports."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline import Context, ModelSource, Precision
from pipeline.checkpoint import PASSAGE, expected_count
from pipeline.planning import (
    BYTES,
    EXPORT,
    LOADED,
    NARROW_FROZEN,
    Extra,
    ModelShape,
    OptimizerShape,
    Planner,
    SampleShape,
    Saving,
    Step,
    StrategyMemory,
    Topology,
    Trial,
)
from stages.adapter.lora import Lora
from stages.average.ema import ELEMENT, EmaAverage
from stages.checkpoint.sharded import CheckpointSettings
from stages.data.chat import ChatData
from stages.export.safetensors import ExportSafetensors
from stages.model.trained import TrainedModel
from stages.precision.policy import PrecisionPolicy

if TYPE_CHECKING:
    from stages.data.text import StreamData, TextData
    from stages.export.adapter import ExportAdapter

BUFFERS = 64 << 20
"""Bytes of a proof's reading buffers and of the activations of a short prompt."""


class DataPlanner(Planner[Any]):
    """Planner of the data stages, whose samples all have at most `sequence_length` tokens."""

    stage: TextData | StreamData | ChatData

    def forecast(self, topology: Topology) -> SampleShape:
        stage = self.stage
        packed = stage.packing if isinstance(stage, ChatData) else stage.documents_apart
        return SampleShape(length=stage.sequence_length, packed=packed)


class PolicyPlanner(Planner[PrecisionPolicy]):
    """Planner of `precision.policy`: the dtypes that the plan is made with."""

    def depends(self) -> Mapping[str, Any]:
        return {"compute": self.stage.compute, "buffer": self.stage.buffer}

    def forecast(self, topology: Topology) -> Precision:
        return self.stage.declared()


class LoraPlanner(Planner[Lora]):
    """Planner of `adapter.lora`."""

    def savings(self, ranks: int) -> Iterator[Saving]:
        if self.stage.quantize is None:
            what = "frozen weights in 4 bits (QLoRA)"
            yield Saving(order=NARROW_FROZEN, what=what, fields={"quantize": "nf4"})

    def trace(self, ctx: Context, model: ModelSource) -> ModelSource:
        source: ModelSource = self.stage.declared(model, seed=ctx.seed)
        return source


class TrainedPlanner(Planner[TrainedModel]):
    """Planner of `model.trained`: the model that was trained, without what training added."""

    def depends(self) -> Mapping[str, Any]:
        return {}  # values only

    def trace(self, ctx: Context, model: ModelSource) -> ModelSource:
        return model.training_view


class EmaPlanner(Planner[EmaAverage]):
    """Planner of `average.ema`: an average of each weight in addition to the strategy's memory."""

    def forecast(self, topology: Topology, strategy: StrategyMemory) -> StrategyMemory:
        averaged = copy.copy(strategy)
        averaged.averaged += ELEMENT
        return averaged


class CheckpointPlanner(Planner[CheckpointSettings]):
    """Planner of `checkpoint.sharded` and `checkpoint.full`: disk, and host memory for each rank's
    copy of its share. State in host memory is copied piece by piece."""

    def for_benchmark(self, trial: Trial) -> CheckpointSettings:
        """Save at the end only, into the run's folder, from a fresh start."""
        once = replace(self.stage, every=None, keep=1, keep_every=None, keep_best=0)
        return replace(once, start_from=None, folder=None)

    def forecast(
        self,
        topology: Topology,
        model: ModelShape,
        precision: Precision,
        optimizer: OptimizerShape,
        strategy: StrategyMemory,
        step: Step,
    ) -> tuple[Extra, ...]:
        master = BYTES[precision.master]
        narrow = optimizer.bits < 16 * optimizer.moments  # their values are saved in fp32
        bits = 32 * optimizer.moments if narrow else optimizer.bits
        trained = round(model.trained * (master + bits / 8 + strategy.averaged))
        size = trained + (model.stored - model.trained) * master
        waits = topology.device == "cpu" or not self.stage.asynchronous
        on_host = strategy.masters[1] != "device"
        copied = 0 if waits else size - trained * on_host
        share, passing = (-(-part // topology.ranks) for part in (copied, size - copied))
        each = share + min(passing, PASSAGE)
        kept = expected_count(self.stage.retention, self.stage.every, step.length)
        return (
            Extra("copy for checkpoints", each * topology.on_node, LOADED),
            Extra(f"{kept} checkpoint{'s' * (kept > 1)}", kept * size),
        )


class ExportPlanner(Planner[Any]):
    """Planner of the export stages: disk for the files, and host memory of rank 0's node for the
    proof, which holds one block at a time, in fp32 if only an adapter is exported."""

    stage: ExportSafetensors | ExportAdapter

    def forecast(self, topology: Topology, model: ModelShape) -> tuple[Extra, ...]:
        each = wide = BYTES.get(self.stage.dtype, BYTES["fp32"])
        elements, adapter = model.exported, 0
        if not isinstance(self.stage, ExportSafetensors):
            elements, wide = model.trained, BYTES["fp32"]
            adapter = each * elements
        proof = wide * model.proven + adapter + BUFFERS
        return Extra("export", each * elements), Extra("proof of the export", proof, (EXPORT,))
