"""The live half of PowerSgd."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from pipeline import Context, ModelSource, OptimizerPlan, Precision
from stages.wrap import (
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
    scorer, optimizers = model.scorer(replica), make_optimizers(plan, module)
    engine = PowerSgdEngine(replica, scorer, optimizers, ctx, precision, plan)
    verify_engine(ctx, engine, {**declared_facts(ctx, precision), "rank": config.rank})
    return engine


class PowerSgdEngine(TorchEngine):
    """A replica on every rank, whose gradients are averaged in low rank in a step's last
    backward."""

    model: DistributedDataParallel

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.model.module
        return module

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self.model.no_sync()

    def describe(self) -> Mapping[str, Any]:
        ((_, state),) = self.model._comm_hooks
        rank = state.matrix_approximation_rank
        return {"engine": "PowerSGD", **self.common_facts(), "rank": rank}
