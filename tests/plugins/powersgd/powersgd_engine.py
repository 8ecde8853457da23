"""The live half of PowerSgd."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from pipeline import Context, ModelSource, OptimizerPlan, Precision
from stages.wrap import (
    ModulePasses,
    TorchEngine,
    build_module,
    declared_facts,
    make_optimizers,
    prime_buckets,
    verify_engine,
)

if TYPE_CHECKING:
    from tests.plugins.powersgd.powersgd import PowerSgd


class OneSeed:
    """Replaces torch's stream of seeds, so that a resumed run uses the projections of an
    undisturbed one: without error feedback and warm start, PowerSGD keeps no other state between
    steps."""

    def randint(self, limit: int) -> int:
        return 0


def build(
    config: PowerSgd, ctx: Context, model: ModelSource, precision: Precision, plan: OptimizerPlan
) -> TorchEngine:
    """Replicate the model, and put the hook between its gradients and their average."""
    everyone = torch.distributed.group.WORLD
    module = build_module(ctx, model, precision, replicas=everyone, casts=True)
    replica = DistributedDataParallel(module, init_sync=False, gradient_as_bucket_view=True)
    state = PowerSGDState(
        everyone,
        matrix_approximation_rank=config.rank,
        start_powerSGD_iter=0,
        use_error_feedback=False,
        warm_start=False,
    )
    state.rng = OneSeed()
    replica.register_comm_hook(state, powerSGD_hook)
    prime_buckets(replica)  # gives a resumed run the buckets of an undisturbed one
    passes = ModulePasses(module, model.scorer(replica), ctx.dist)
    engine = PowerSgdEngine(replica, passes, make_optimizers(plan, module), precision, plan)
    verify_engine(ctx, engine, {**declared_facts(ctx, precision), "rank": config.rank})
    return engine


class PowerSgdEngine(TorchEngine):
    """A replica on every rank, whose gradients are averaged in low rank in a step's last
    backward."""

    def __init__(self, replica: DistributedDataParallel, *rest: Any) -> None:
        super().__init__(*rest)
        self._replica = replica

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self._replica.no_sync()

    def describe(self) -> Mapping[str, Any]:
        ((_, state),) = self._replica._comm_hooks
        rank = state.matrix_approximation_rank
        return {"engine": "PowerSGD", **self.common_facts(), "rank": rank}
