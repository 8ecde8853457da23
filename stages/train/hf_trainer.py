"""Training with transformers' Trainer."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from annotated_types import Gt

from pipeline.contracts.data import Data
from pipeline.contracts.engine import Engine
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.precision import Precision
from pipeline.contracts.stage import Context, PlanView
from pipeline.contracts.training import Checkpoints, TrainedRun
from pipeline.errors import Problem
from pipeline.utils.text import closest
from stages.importing.trainer import TRAINER
from stages.train.causal_lm import TrainCausalLm

Count = Annotated[int, Gt(0)]


@dataclass(frozen=True, kw_only=True)
class HfTrainer:
    """Train on next-token prediction with transformers' Trainer, replicated on every process.

    The recipe has no wrap and no checkpoint slot: the Trainer wraps the model itself
    (DistributedDataParallel) and keeps its own checkpoints, `checkpoints/checkpoint-N` in the run
    folder. Samples, their order, the loss, the learning rates, clipping and dtypes are the
    recipe's, and mean what they mean with other train stages.
    """

    global_batch_size: Count
    """Samples in one optimizer step, over all processes and micro-batches."""

    steps: Count | None = None
    """Optimizer steps to train for. Exactly one of `steps` and `epochs`."""

    epochs: Annotated[float, Gt(0)] | None = None
    """Passes over the training samples, may be a fraction. Exactly one of `steps` and `epochs`."""

    micro_batch_size: Count | None = None
    """Samples of one forward pass on one process; null derives it from `accumulation`."""

    accumulation: Count | None = None
    """Micro-batches of one step on one process; null derives it from `micro_batch_size`, or is
    1."""

    shuffle: bool = True
    """Shuffle anew every epoch, by the recipe's seed; false trains in file order."""

    log_every: Count = 10
    """Steps between two lines on screen. `metrics.jsonl` has every step."""

    eval_every: Count | None = None
    """Steps between evaluations on held-out samples; null evaluates at the end only."""

    save_every: Count | None = None
    """Steps between checkpoints; null saves at the end only."""

    keep: Count | None = 2
    """Newest checkpoints to keep; null keeps all."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further TrainingArguments, named as transformers does (`activation_checkpointing`,
    `torch_compile`, `report_to`). One that a field above or another slot decides is refused."""

    def batches(self) -> TrainCausalLm:
        """The samples of every step, as the common loop has them."""
        return TrainCausalLm(
            global_batch_size=self.global_batch_size,
            steps=self.steps,
            epochs=self.epochs,
            micro_batch_size=self.micro_batch_size,
            accumulation=self.accumulation,
            shuffle=self.shuffle,
        )

    def check(self, plan: PlanView) -> Iterator[Problem]:

        yield from replace(self.batches(), eval_every=self.eval_every).check(plan)
        yield from problems(self, plan)

    def run(
        self,
        ctx: Context,
        data: Data,
        optimizer: OptimizerPlan,
        precision: Precision,
        model: ModelSource,
    ) -> TrainedRun:
        from stages.train.hf_trainer_run import train

        return train(self, ctx, data, optimizer, precision, model)


FREE = frozenset(
    (
        *("activation_checkpointing", "activation_checkpointing_kwargs"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
        *("torch_compile", "torch_compile_backend", "torch_compile_mode"),
        *("use_liger_kernel", "liger_kernel_config", "neftune_noise_alpha"),
        *("torch_empty_cache_steps", "tf32", "full_determinism", "debug", "skip_memory_metrics"),
        *("ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph"),
        *("ddp_broadcast_buffers", "report_to", "run_name", "project", "trackio_space_id"),
        *("trackio_bucket_id", "trackio_static_space_id", "log_level", "log_level_replica"),
    )
)
"""TrainingArguments that no slot decides and that leave samples, loss and checkpoints alone."""

SHARDED = "sharded checkpoints of the Trainer cannot be read again; use wrap.fsdp or wrap.zero"
OWNERS = {
    ("fsdp", "deepspeed", "parallelism_config"): SHARDED,
    ("learning_rate", "lr_", "warmup", "optim", "weight_", "adam_", "max_grad"): (
        "the optimizer slot decides it"
    ),
    ("bf16", "fp16"): "the precision slot decides dtypes",
    ("save_", "load_best", "resume", "output_dir"): "save_every and keep decide checkpoints",
    ("eval_", "do_eval", "per_device_eval"): "eval_every decides evaluation",
    ("logging_",): "log_every decides what is shown",
    ("push_", "hub_"): "a publish slot uploads the export",
    ("seed", "data_seed"): "the recipe's seed decides it",
    ("use_cpu",): "the recipe's launch decides the device",
}
"""Beginnings of names -> who decides."""
BATCHES = "the fields of this slot, the data slot and the loss decide it"


def problems(stage: HfTrainer, plan: PlanView) -> Iterator[Problem]:
    """Every problem of `stage`, keys relative to it."""
    for name in stage.arguments:
        key = f"arguments.{name}"
        if name in FREE:
            continue
        if name in TRAINER:
            yield Problem(key=key, message="is not free", hint=_owner(name))
        else:
            similar = closest(name, FREE)
            hint = f"did you mean `{similar}`?" if similar else ""
            yield Problem(key=key, message="is no TrainingArgument that can be given", hint=hint)
    yield from _impossible_here(stage.arguments, plan)
    for policy in plan.giving(Precision):
        yield from _precision(policy.compute, policy.master, policy.reduce)
    for given, what in ((Engine, "wrap"), (Checkpoints, "checkpoint")):
        if any(plan.giving(given)):
            yield Problem(
                key="arguments",
                message=f"the Trainer does not use the {what} slot",
                hint="remove that slot, or use train.causal_lm",
            )


def _impossible_here(arguments: Mapping[str, Any], plan: PlanView) -> Iterator[Problem]:
    """What the Trainer would end with when it is made."""
    if arguments.get("tf32") and plan.device == "cpu":
        yield Problem(key="arguments.tf32", message="needs a GPU")
    if arguments.get("use_liger_kernel"):
        yield from _needs("use_liger_kernel", "liger-kernel")
    told = arguments.get("report_to") or ()
    for tracker in [told] if isinstance(told, str) else told:
        if tracker not in ("none", "all"):
            yield from _needs("report_to", tracker)


def _needs(argument: str, package: str) -> Iterator[Problem]:
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        hint = f"pip install {package}"
        yield Problem(key=f"arguments.{argument}", message=f"needs {package}", hint=hint)


def _owner(name: str) -> str:
    for beginnings, owner in OWNERS.items():
        if name.startswith(beginnings):
            return owner
    return BATCHES


def _precision(compute: str, master: str, reduce: str) -> Iterator[Problem]:
    if compute == "fp16":
        message = "the Trainer scales losses under autocast only"
        yield Problem(key="arguments", message=message, hint="set compute: bf16")
    if master != "fp32" or reduce != "fp32":
        yield Problem(
            key="arguments",
            message="the Trainer keeps fp32 weights and averages their gradients as they are",
            hint="set master: fp32 and reduce: fp32 in the precision slot",
        )
