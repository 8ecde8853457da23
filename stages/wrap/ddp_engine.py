"""The live side of wrap.ddp."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pipeline.contracts.engine import DataAxis
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.precision import Precision, dtype_name, torch_dtype
from pipeline.contracts.stage import Context
from stages.wrap.compute_cast import cast_on_use, installed_casts
from stages.wrap.load_weights import load_weights
from stages.wrap.materialize import (
    build_empty,
    cast_buffers,
    expected_buffers,
    materialize,
    named_parameters,
)
from stages.wrap.optimizer_step import make_optimizer, make_scaler
from stages.wrap.torch_compat import hook_states, keeps_gradients, no_buffer_sync, settle_buckets
from stages.wrap.torch_engine import TorchEngine, local_parts
from stages.wrap.verify_engine import verify_engine

if TYPE_CHECKING:
    from stages.wrap.ddp import Ddp


def build(
    config: Ddp, ctx: Context, model: ModelSource, precision: Precision, plan: OptimizerPlan
) -> TorchEngine:
    """Build, load_weights, cast, replicate; the optimizer last."""
    with contextlib.closing(model.weights()) as reader:  # which tells what does not fit
        module = build_empty(model, precision)
        materialize(module, ctx.dist.device, buffer_device=ctx.dist.device)
        load_weights(local_parts(module), reader, ctx, torch.distributed.group.WORLD)
    cast_buffers(module, precision)
    if precision.compute != precision.master:
        cast_on_use(module, torch_dtype(precision.compute))
    engine = DdpEngine(_replicate(config, module, ctx, precision), ctx, precision, plan)
    verify_engine(ctx, engine, _expected(ctx, precision))
    return engine


def _replicate(
    config: Ddp, module: nn.Module, ctx: Context, precision: Precision
) -> DistributedDataParallel:
    device = ctx.dist.device
    replicated = DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=config.bucket_cap_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
        find_unused_parameters=config.find_unused_parameters,
        init_sync=False,  # load_weights() has sent every rank the same values
        **no_buffer_sync(),
    )
    if precision.reduce != precision.master:
        reduction = ReduceIn(torch_dtype(precision.reduce), replicated.process_group)
        replicated.register_comm_hook(reduction, reduce_in)
    if not config.static_graph:  # which settles with its first real backward
        settle_buckets(replicated)
    return replicated


def _expected(ctx: Context, precision: Precision) -> dict[str, Any]:
    return {
        "engine": "DistributedDataParallel",
        "world_size": ctx.dist.world_size,
        "device": ctx.dist.device.type,
        "master": [precision.master],
        "compute": [precision.compute],
        "reduce": [precision.reduce],
        **expected_buffers(precision),
    }


class DdpEngine(TorchEngine):
    """A replica on every rank; gradients averaged in buckets during the last backward of a step."""

    model: DistributedDataParallel

    def __init__(
        self,
        model: DistributedDataParallel,
        ctx: Context,
        precision: Precision,
        plan: OptimizerPlan,
    ) -> None:
        self.model = model
        self.device = ctx.dist.device
        self.shard = DataAxis(index=ctx.dist.rank, count=ctx.dist.world_size)
        self.optimizer = make_optimizer(plan, plan.groups(named_parameters(model.module)))
        self.scaler = make_scaler(precision, self.device)
        self.plan = plan
        self._to_record = model.static_graph
        self.keeps_gradients = keeps_gradients(model)

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.model.module
        return module

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        # torch records a static graph in the very first backward, which must then reduce; averaging
        # what is averaged again at the end of the step changes nothing but rounding.
        reduce, self._to_record = last or self._to_record, False
        return contextlib.nullcontext() if reduce else self.model.no_sync()

    def describe(self) -> Mapping[str, Any]:
        module = self.model.module
        reductions = [state for state in hook_states(self.model) if isinstance(state, ReduceIn)]
        casts = {dtype_name(cast.dtype) for cast in installed_casts(module)}
        common = self.common_facts()
        return {
            "engine": type(self.model).__name__,
            **common,
            "world_size": self.model.process_group.size(),
            "compute": sorted(casts) or common["master"],
            "reduce": [dtype_name(state.dtype) for state in reductions] or common["master"],
        }


# No postponed annotations here: DDP compares the hook's annotations with its own classes.


@dataclass(frozen=True)
class ReduceIn:
    """What the hook is registered with: the dtype to reduce in, among which processes."""

    dtype: torch.dtype
    group: torch.distributed.ProcessGroup


def reduce_in(state: ReduceIn, bucket: GradBucket) -> Future[Tensor]:
    """A DDP communication hook: cast a bucket, average it over all ranks, cast it back.

    torch's own hooks do the same for NCCL only.
    """
    gradient = bucket.buffer()
    # Dividing first keeps the sum in the range of fp16.
    narrow = gradient.to(state.dtype).div_(state.group.size())
    work = torch.distributed.all_reduce(narrow, group=state.group, async_op=True)
    assert work is not None

    def widen(future: Future[list[Tensor]]) -> Tensor:
        return gradient.copy_(future.value()[0])

    return cast(Future[Tensor], work.get_future().then(widen))
