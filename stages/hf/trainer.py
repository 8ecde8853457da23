"""Training with transformers' Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline import (
    Checkpoints,
    Context,
    Data,
    Engine,
    ModelSource,
    OptimizerPlan,
    PlanView,
    Precision,
    Problem,
    StepCallback,
    TrainedRun,
    traits,
)
from pipeline.utils import closest
from stages.train.settings import TrainerFields, heldout_problems, several_rules


@dataclass(frozen=True, kw_only=True)
class HfTrainer(TrainerFields):
    """Train on next-token prediction with transformers' Trainer, replicated on every process.

    The recipe has no wrap and no checkpoint slot: the Trainer wraps the model itself
    (DistributedDataParallel) and keeps its own checkpoints, `checkpoints/checkpoint-N` in the run
    folder. Samples, their order, the loss, the learning rates, clipping and dtypes are the
    recipe's, and mean the same as with other train stages.
    """

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from super().check(plan)
        yield from heldout_problems(self, plan, ["eval_every"] if self.eval_every else [])
        for name in self.arguments:
            if name not in FREE:
                hint = f"did you mean `{near}`?" if (near := closest(name, FREE)) else ""
                if name == "report_to":
                    hint = "add a slot before train, such as track: {use: track.wandb}"
                message = "is not a TrainingArgument, or is set by a slot of the recipe"
                yield Problem(key=f"arguments.{name}", message=message, hint=hint)
        # What other slots ask for and the Trainer does not do.
        policy, found = plan.producer(self, Precision), list[tuple[str, str]]()
        if isinstance(policy, traits.DeclaresDtypes):
            if policy.compute == "fp16":
                message = "the Trainer scales losses under autocast only"
                found.append((message, "set compute: bf16"))
            if policy.master != "fp32" or policy.reduce != "fp32":
                message = "the Trainer keeps fp32 weights and averages their gradients in fp32"
                found.append((message, "set master: fp32 and reduce: fp32 in the precision slot"))
        optimizer = plan.producer(self, OptimizerPlan)
        if isinstance(optimizer, traits.DeclaresRules):
            found += several_rules(optimizer.update_rules())
        wires = plan.wiring
        for given, slot in ((Engine, "wrap"), (Checkpoints, "checkpoint")):
            read = [wires.readers(one) for one in wires.kinds if wires.gives(one, given)]
            if not all(any(wires.gives(one, TrainedRun) for one in readers) for readers in read):
                message = f"the Trainer does not use the {slot} slot"
                found.append((message, "remove that slot, or use train.causal_lm"))
        for message, hint in found:
            yield Problem(key="arguments", message=message, hint=hint)

    def run(
        self, ctx: Context, data: Data, optimizer: OptimizerPlan, precision: Precision,
        model: ModelSource, callback: StepCallback | None = None,
    ) -> TrainedRun:  # fmt: skip
        from stages.hf.trainer_run import train

        return train(self, ctx, data, optimizer, precision, model, callback)


FREE = frozenset(
    {
        "activation_checkpointing", "activation_checkpointing_kwargs", "ddp_broadcast_buffers",
        "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph", "debug",
        "full_determinism", "gradient_checkpointing", "gradient_checkpointing_kwargs",
        "liger_kernel_config", "log_level", "log_level_replica", "neftune_noise_alpha",
        "skip_memory_metrics", "tf32", "torch_compile", "torch_compile_backend",
        "torch_compile_mode", "torch_empty_cache_steps", "use_liger_kernel",
    }
)  # fmt: skip
"""TrainingArguments that no slot decides and that change neither samples, loss nor checkpoints."""
