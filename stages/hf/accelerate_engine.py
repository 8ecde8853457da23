"""The live half of wrap.accelerate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule

from pipeline import (
    Context,
    ModelSource,
    OptimizerPlan,
    Precision,
    StageError,
    StepGuard,
    StepReport,
)
from stages.hf import accelerate_compat as compat
from stages.model.declared import FrozenSource
from stages.wrap.build import build_module, declared_facts, verify_engine
from stages.wrap.optimizer_state import make_optimizers
from stages.wrap.torch_compat import require_reduced, sharding_facts
from stages.wrap.torch_engine import ModulePasses, TorchEngine


def build(
    file: Path, ctx: Context, model: ModelSource, precision: Precision, plan: OptimizerPlan, *,
    sharded: bool,
) -> TorchEngine:  # fmt: skip
    """Build the model, load its weights, and let accelerate wrap it with its optimizer. Raises
    StageError if accelerate would shard a model that is not trained."""
    # Sharding moves each rank's part to the device; a replica lives there from the start.
    model = model if plan.parts else FrozenSource(model)
    module = build_module(ctx, model, precision, home=torch.device("cpu") if sharded else None)
    expected = declared_facts(ctx, precision)
    if not plan.parts:
        if sharded:
            raise StageError(
                "accelerate shards a model together with its optimizer, and this one has none",
                hint="use wrap.fsdp for a model that is not trained",
            )
        passes = ModulePasses(module, model.scorer(module), ctx.dist)
        plain = TorchEngine(passes, [], precision, plan)
        verify_engine(ctx, plain, expected)
        return plain
    optimizers = make_optimizers(plan, module)
    with compat.launched(file, ctx.dist.world_size):
        accelerator = Accelerator(cpu=ctx.dist.device.type == "cpu", gradient_accumulation_steps=1)
        ctx.on_exit(compat.reset_state)
        wrapped, *prepared = accelerator.prepare(module, *(one.optimizer for one in optimizers))
    live = [
        one._replace(optimizer=own.optimizer) for one, own in zip(optimizers, prepared, strict=True)
    ]
    part = accelerator.unwrap_model(wrapped)
    passes = ModulePasses(part, model.scorer(wrapped), ctx.dist)
    engine = AcceleratedEngine(accelerator, wrapped, passes, live, precision, plan)
    replicated = "DistributedDataParallel" if ctx.dist.world_size > 1 else "none"
    verify_engine(ctx, engine, {
        **expected,
        "engine": "fully_shard" if sharded else replicated,
        "reduce": [precision.reduce if sharded else precision.master],
    })  # fmt: skip
    return engine


class AcceleratedEngine(TorchEngine):
    """Model and optimizer as accelerate has wrapped them. Accumulation, clipping and loss scaling
    are this engine's, as under every other strategy."""

    def __init__(self, accelerator: Accelerator, wrapped: Any, *rest: Any) -> None:
        super().__init__(*rest)
        self._accelerator, self._wrapped = accelerator, wrapped

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        if last:
            return nullcontext()
        waiting: AbstractContextManager[None] = self._accelerator.no_sync(self._wrapped)
        return waiting

    def step(
        self, *, lr_scales: Sequence[float], should_step: StepGuard | None = None
    ) -> StepReport:
        require_reduced(self._wrapped)
        return super().step(lr_scales=lr_scales, should_step=should_step)

    def describe(self) -> Mapping[str, Any]:
        self.to_sharded()
        common = self.common_facts()
        master = common["master"]
        sharded = isinstance(self._wrapped, FSDPModule)
        facts = sharding_facts([self._wrapped]) if sharded else {}
        replicated = "none" if self._wrapped is self.parts[0] else type(self._wrapped).__name__
        return {
            "engine": "fully_shard" if sharded else replicated,
            **common,
            "world_size": self._accelerator.num_processes,
            # A policy without a dtype keeps the parameters' own.
            **{key: master for key in ("compute", "reduce") if facts.get(key) in (None, ["None"])},
            **{key: value for key, value in facts.items() if value != ["None"]},
        }
