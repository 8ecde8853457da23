"""Planners of all stages but those that wrap."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline import Context, MicroBatch, ModelSource, Precision, StageError, planning
from pipeline.checkpoint import PASSAGE, expected_count
from pipeline.planning import BYTES, Extra, Planner, SampleShape, Saving, Topology, TraceScope
from stages.adapter.lora import Lora
from stages.average.ema import ELEMENT, EmaAverage
from stages.checkpoint.sharded import CheckpointSettings
from stages.data.stages import ChatData, StreamData, TextData
from stages.export.safetensors import ExportAdapter, ExportSafetensors
from stages.model.config_checks import has_experts
from stages.model.files import is_local, read_config
from stages.model.hf import Compile, HfModel, TrainedModel
from stages.optimizer.adamw import AdamW, Moments
from stages.precision.policy import PrecisionPolicy
from stages.train.causal_lm import TrainCausalLm

if TYPE_CHECKING:
    from torch import Tensor

    from stages.optimizer import Lion

LEFT_OUT = {
    "fp8": "copies of weights and activations in 8 bits are not counted",
    "kernels": "fused kernels keep less for backward than is counted here",
}
"""Field that a plan leaves out, as it needs values or a GPU -> the effect that is not counted."""
SINGLE = 2
"""Temporary copies of a parameter in torch's kernel `single`; `fused` makes none."""
LOW_BIT: dict[Moments, tuple[float, float, float]] = {
    "master": (0, 0, 24),
    "fp32": (32, 0, 24),
    "bf16": (16, 0, 24),
    "8bit": (8 + 1 / 8, 8, 49),
}
"""Bits of one moment with its block's scale (0: a weight's). Temporary bytes of an update for each
element of a parameter, if torch's kernels do not compute it: compiled (buffers of the code that
torch 2.13 generates for CPUs, counted by a test), and not compiled, as traced."""
ROUNDING = (4, 12)
"""Further temporary bytes for each element with stochastic rounding, likewise."""
BUFFERS = 64 << 20
"""Bytes of a proof's reading buffers and of the activations of a short prompt."""


class HfPlanner(Planner[HfModel]):
    """The model is built from its config only."""

    def depends(self) -> Mapping[str, Any]:
        return {
            "config": read_config(self.stage),
            "attention": self.stage.attention,
            "recomputed": self.stage.activation_checkpointing,
            "compiled": self.stage.compile is not None,
            "frozen": self.stage.frozen,
        }

    def forecast(self, topology: Topology) -> tuple[str, ...]:
        found = [LEFT_OUT[name] for name in LEFT_OUT if getattr(self.stage, name) is not None]
        if has_experts(read_config(self.stage)):
            found.append(
                "fused kernels for experts: transformers' own code takes longer, and that is what "
                "is expected here"
            )
        return tuple(found)

    def savings(self, ranks: int) -> Iterator[Saving]:
        recomputed, name = self.stage.activation_checkpointing, "activation_checkpointing"
        if recomputed is None:
            what = "activations of blocks are computed again in backward"
            yield Saving(planning.RECOMPUTE, what, {name: {}})
        elif not recomputed.offload:
            fields = {name: dataclasses.asdict(recomputed) | {"offload": True}}
            yield Saving(planning.AWAY, "their inputs wait in host memory", fields)

    def trace(self, ctx: Context, scope: TraceScope) -> ModelSource:
        from stages.model.source import open_source

        left_out: dict[str, Any] = dict.fromkeys([*LEFT_OUT, "tokenizer"])
        if self.stage.attention not in ("sdpa", "eager"):  # kernels that are not on every machine
            from stages.model.compat import planned_attention

            left_out["attention"] = planned_attention()
        if self.stage.compile is not None:
            left_out["compile"] = Compile(backend=planning.traced_backend(), dynamic=False)
        stage = replace(self.stage, init="random", **left_out)
        if stage.path is not None and not is_local(stage.path):
            stage = replace(stage, path=None, config=read_config(replace(stage, vocab_size=None)))
        source = open_source(stage, ctx)
        if scope.blocks is not None:
            shorten(source.config.get_text_config(), scope.blocks)
        elif stage.frozen:
            source.require_frozen()  # of fewer blocks, patterns may match none
        return source


def shorten(config: Any, blocks: int) -> None:
    """Keep the first `blocks` blocks of a config, and their part of its lists. Raises StageError
    for a config without num_hidden_layers."""
    count = getattr(config, "num_hidden_layers", None)
    if count is None:
        raise StageError(
            f"a {config.model_type} cannot be planned: its config has no num_hidden_layers",
            hint="`pipe bench` measures its memory and time",
        )
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == count:
            setattr(config, name, value[:blocks])
    config.num_hidden_layers = blocks


class TrainedPlanner(Planner[TrainedModel]):
    """The model that was trained, without what training added."""

    def depends(self) -> Mapping[str, Any]:
        return {}  # values only

    def trace(self, ctx: Context, model: ModelSource) -> ModelSource:
        return model.training_view


class LoraPlanner(Planner[Lora]):
    def savings(self, ranks: int) -> Iterator[Saving]:
        if self.stage.quantize is None:
            what = "frozen weights in 4 bits (QLoRA)"
            yield Saving(planning.NARROW_FROZEN, what, {"quantize": "nf4"})

    def trace(self, ctx: Context, model: ModelSource) -> ModelSource:
        source: ModelSource = self.stage.declared(model, seed=ctx.seed)
        return source


class PolicyPlanner(Planner[PrecisionPolicy]):
    def depends(self) -> Mapping[str, Any]:
        return {"compute": self.stage.compute, "buffer": self.stage.buffer}

    def forecast(self, topology: Topology) -> Precision:
        return self.stage.declared()


class DataPlanner(Planner[Any]):
    """Samples of all data stages have at most `sequence_length` tokens."""

    stage: TextData | StreamData | ChatData

    def forecast(self, topology: Topology) -> SampleShape:
        stage = self.stage
        packed = stage.packing if isinstance(stage, ChatData) else stage.documents_apart
        return SampleShape(length=stage.sequence_length, packed=packed)


class AdamWPlanner(Planner[AdamW]):
    def forecast(self, topology: Topology, precision: Precision) -> planning.OptimizerShape:
        stage, master = self.stage, BYTES[precision.master]
        bits, *low_bit = LOW_BIT[stage.moments]
        eager = stage.kernel != "fused"
        taken = low_bit[eager] + ROUNDING[eager] * stage.stochastic_rounding
        return planning.OptimizerShape(
            algorithm=stage.algorithm,
            bits=2 * (bits or 8 * master),
            moments=2,
            taken=master * SINGLE * eager if stage.algorithm == "adamw" else taken,
        )

    def savings(self, ranks: int) -> Iterator[Saving]:
        stage = self.stage
        if stage.moments == "master":
            what = "moments in blocks of 8 bits"
            yield Saving(planning.NARROW_MOMENTS, what, {"moments": "8bit"})
        if not stage.stochastic_rounding:
            # Moments in bf16, like the masters, would lose their own small changes.
            moments = "8bit" if stage.moments == "master" else stage.moments
            what = "bf16 masters with stochastic rounding, moments in blocks of 8 bits"
            fields, beside = {"moments": moments, "stochastic_rounding": True}, {"master": "bf16"}
            yield Saving(planning.NARROW_MASTERS, what, fields, {Precision: beside})


class LionPlanner(Planner[Any]):
    stage: Lion

    def forecast(self, topology: Topology, precision: Precision) -> planning.OptimizerShape:
        bits, name = 8 * BYTES[precision.master], self.stage.algorithm
        return planning.OptimizerShape(algorithm=name, bits=bits, moments=1, taken=bits / 8)


class EmaPlanner(Planner[EmaAverage]):
    """An average of each weight next to the strategy's memory."""

    def forecast(
        self, topology: Topology, strategy: planning.StrategyMemory
    ) -> planning.StrategyMemory:
        averaged = copy.copy(strategy)
        averaged.averaged += ELEMENT
        return averaged


class CheckpointPlanner(Planner[CheckpointSettings]):
    """Disk, and host memory for a rank's copy of its share; state on the host goes by pieces."""

    def for_benchmark(self, trial: planning.Trial) -> CheckpointSettings:
        """Save at the end only, into the run's folder, from a fresh start."""
        once = replace(self.stage, every=None, keep=1, keep_every=None, keep_best=0)
        return replace(once, start_from=None, folder=None)

    def forecast(
        self, topology: Topology, model: planning.ModelShape, precision: Precision,
        optimizer: planning.OptimizerShape, strategy: planning.StrategyMemory, step: planning.Step,
    ) -> tuple[Extra, ...]:  # fmt: skip
        master = BYTES[precision.master]
        narrow = optimizer.bits < 16 * optimizer.moments  # their values are saved in fp32
        bits = 32 * optimizer.moments if narrow else optimizer.bits
        trained = round(model.trained * (master + bits / 8 + strategy.averaged))
        size = trained + (model.stored - model.trained) * master
        waits = topology.device == "cpu" or not self.stage.asynchronous
        copied = 0 if waits else size - trained * (strategy.masters[1] != "device")
        share, passing = (-(-part // topology.ranks) for part in (copied, size - copied))
        each = share + min(passing, PASSAGE)
        kept = expected_count(self.stage.retention, self.stage.every, step.length)
        return (
            Extra("copy for checkpoints", each * topology.on_node, planning.LOADED),
            Extra(f"{kept} checkpoint{'s' * (kept > 1)}", kept * size),
        )


class ExportPlanner(Planner[Any]):
    """Disk for the files, and host memory of rank 0's node for the proof, which holds one block at
    a time, in fp32 if only an adapter is exported."""

    stage: ExportSafetensors | ExportAdapter

    def forecast(self, topology: Topology, model: planning.ModelShape) -> tuple[Extra, ...]:
        each = wide = BYTES.get(self.stage.dtype, BYTES["fp32"])
        elements, adapter = model.exported, 0
        if not isinstance(self.stage, ExportSafetensors):
            elements, wide = model.trained, BYTES["fp32"]
            adapter = each * elements
        proof = Extra(
            "proof of the export", wide * model.proven + adapter + BUFFERS, (planning.EXPORT,)
        )
        return Extra("export", each * elements), proof


class CausalLmPlanner(Planner[TrainCausalLm]):
    """Samples of a step, and a micro-batch without data."""

    def depends(self) -> Mapping[str, Any]:
        return {"loss_chunk_size": self.stage.loss_chunk_size}

    def for_benchmark(self, trial: planning.Trial) -> TrainCausalLm:
        """No evaluations, texts and rollbacks; the micro-batch is its own, or follows from
        `trial.shares`."""
        policy, names = self.stage.anomalies, ("non_finite", "spike")
        skips: dict[str, Any] = {n: "skip" for n in names if getattr(policy, n) == "rollback"}
        return replace(
            self.stage, steps=trial.steps, epochs=None,
            global_batch_size=trial.grown(self.stage.global_batch_size),
            micro_batch_size=self.stage.microbatch_size(trial.shares), accumulation=None,
            eval_every=None, eval_first=False, eval_last=False, early_stopping=None,
            generate=None, result="last", anomalies=replace(policy, **skips),
            profile_steps=trial.profile,
        )  # fmt: skip

    def savings(self, ranks: int) -> Iterator[Saving]:
        if self.stage.loss_chunk_size is None:
            what = "logits of 1024 tokens at a time"
            yield Saving(planning.CHUNK, what, {"loss_chunk_size": 1024})
        size, what = self.stage.microbatch_size(ranks), "smaller micro-batches, more of them"
        if size > 1:
            yield Saving(planning.SMALLER, what, {"micro_batch_size": size // 2})

    def forecast(self, topology: Topology, samples: SampleShape) -> planning.Step:
        """An optimizer step as the loop divides it."""
        stage, most = self.stage, -(-self.stage.global_batch_size // topology.data_ranks)
        size = min(stage.microbatch_size(topology.data_ranks), most)
        return planning.Step(
            microbatches=-(-most // size), micro_batch=size, of_rank=most,
            samples=stage.global_batch_size, tokens=stage.global_batch_size * samples.length,
            length=stage.length(),
        )  # fmt: skip

    def trace(self, ctx: Context, samples: SampleShape, scope: TraceScope) -> None:
        from stages.objectives.cross_entropy import CrossEntropy

        with without_values(samples, scope.once):
            objective = CrossEntropy(self.stage.loss_chunk_size)
            scope.run(batch_of_zeros(scope.samples, samples), objective)


@contextlib.contextmanager
def without_values(
    samples: SampleShape, once: Callable[[Any, Callable[[], Any]], Any]
) -> Iterator[None]:
    """Run models and losses on tensors without values in the body: with the masks of real samples,
    tokens spread over all experts, and one of a loss's equal chunks, which a long sample has
    thousands of, counted `once` (`TraceScope`)."""
    from stages.model.compat import masks_of_values
    from stages.objectives import chunked
    from stages.wrap.experts_compat import balanced_routing

    original = chunked._chunk

    def chunk(hidden: Tensor, *rest: Any) -> Any:
        rows = next(one for one in rest if isinstance(one, slice))
        size = min(rows.stop, len(hidden)) - rows.start
        return once(size, lambda: original(hidden, *rest))

    with masks_of_values(packed=samples.packed), balanced_routing():
        chunked._chunk = chunk  # type: ignore[assignment]
        try:
            yield
        finally:
            chunked._chunk = original


def batch_of_zeros(size: int, samples: SampleShape) -> MicroBatch:
    """A micro-batch; packed samples have documents of half the length."""
    import torch

    ids = torch.zeros(size, samples.length, dtype=torch.int64)
    tokens = {"input_ids": ids, "labels": ids.clone()}
    if samples.packed:
        half = torch.arange(samples.length) % max(samples.length // 2, 1)
        tokens["positions"] = half.expand(size, -1).contiguous()
    return MicroBatch(tokens=tokens)
