"""Wrapping by Hugging Face accelerate, as its configuration file says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline import (
    Context,
    Engine,
    ModelSource,
    OptimizerPlan,
    PipeError,
    PlanView,
    Precision,
    Problem,
)
from pipeline.importing import read_config
from stages.hf.accelerate_file import problems


@dataclass(frozen=True, kw_only=True)
class Accelerate:
    """Replicate or shard the model as a configuration file of Hugging Face accelerate says: with
    torch's DistributedDataParallel, or on GPUs with fully_shard (FSDP2).

    `accelerate.Accelerator` wraps model and optimizer; the file is read by accelerate's own
    launcher. The recipe decides batches, accumulation, clipping, dtypes and processes. Every
    process holds the whole model in host memory until FSDP shards it. `pipe import` translates such
    a file, also one for DeepSpeed, into a recipe without accelerate.
    """

    config: str
    """The file, as `accelerate config` writes it."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        try:
            content = read_config(Path(self.config).expanduser()).content
        except PipeError as error:
            yield Problem(key="config", message=str(error))
            return
        policy = plan.producer(self, Precision)
        for message, hint in problems(self.config, content, plan, policy):
            yield Problem(key="config", message=message, hint=hint)

    def run(
        self, ctx: Context, model: ModelSource, precision: Precision, optimizer: OptimizerPlan
    ) -> Engine:
        from stages.hf.accelerate_engine import build

        return build(self.config, ctx, model, precision, optimizer)
