"""What an accelerate configuration file says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts import ModelSource, OptimizerPlan, Precision
from pipeline.engine import Engine
from pipeline.errors import Problem
from pipeline.importing.files import read_config
from pipeline.stage import Context, PlanView


@dataclass(frozen=True, kw_only=True)
class Accelerate:
    """Replicate or shard the model as a configuration file of Hugging Face accelerate says: with
    torch's DistributedDataParallel, on GPUs with fully_shard (FSDP2), or with DeepSpeed.

    `accelerate.Accelerator` wraps model and optimizer; the file is read by accelerate's own
    launcher. Settings that accelerate would only hand on to DeepSpeed go to wrap.zero. Batches,
    accumulation, clipping, dtypes and processes are those of the recipe. Every process holds the
    whole model in host memory until FSDP shards it. `pipe import` translates such a file into a
    recipe that does without accelerate.
    """

    config: str
    """The file, as `accelerate config` writes it."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        from stages.wrap.accelerate_checks import problems

        yield from problems(self, plan)

    def run(
        self, ctx: Context, model: ModelSource, precision: Precision, optimizer: OptimizerPlan
    ) -> Engine:
        from stages.wrap.accelerate_checks import KEY, is_handed_on
        from stages.wrap.accelerate_handed import HandedOn

        path = Path(self.config).expanduser()
        if is_handed_on(read_config(path).content):
            engine: Engine = HandedOn(path, KEY).stage.run(ctx, model, precision, optimizer)
            return engine
        from stages.wrap.accelerate_engine import build

        return build(self, ctx, model, precision, optimizer)
