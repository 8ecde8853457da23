"""Training with transformers' Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from annotated_types import Gt

from pipeline.artifacts import Data, ModelSource, OptimizerPlan, Precision, TrainedRun
from pipeline.errors import Problem
from pipeline.stage import Context, PlanView
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
        from stages.train.hf_trainer_checks import problems

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
