"""What an accelerate configuration file says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.artifacts import ModelSource, OptimizerPlan, Precision
from pipeline.engine import Engine
from pipeline.errors import Problem
from pipeline.stage import Context, PlanView


@dataclass(frozen=True, kw_only=True)
class Accelerate:
    """Replicate or shard the model as a configuration file of Hugging Face accelerate says: with
    torch's DistributedDataParallel, or on GPUs with fully_shard (FSDP2).

    `accelerate.Accelerator` wraps model and optimizer; the file is read by accelerate's own
    launcher. Batches, accumulation, clipping, dtypes and processes are those of the recipe. Every
    process holds the whole model in host memory until it is sharded. `pipe import` translates such
    a file into a recipe that does without accelerate.
    """

    config: str
    """The file, as `accelerate config` writes it."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        from stages.wrap.accelerate_checks import problems

        yield from problems(self, plan)

    def run(
        self, ctx: Context, model: ModelSource, precision: Precision, optimizer: OptimizerPlan
    ) -> Engine:
        from stages.wrap.accelerate_engine import build

        return build(self, ctx, model, precision, optimizer)
