"""The live half of wrap.ddp."""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with its classes.

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pipeline import (
    Context,
    ModelSource,
    OptimizerPlan,
    Precision,
    StepGuard,
    StepReport,
    dtype_name,
    torch_dtype,
)
from stages.model.declared import FrozenSource
from stages.wrap.axes import required
from stages.wrap.build import build_module, declared_facts, verify_engine
from stages.wrap.context_compat import divide_sequence
from stages.wrap.optimizer_state import make_optimizers
from stages.wrap.torch_compat import (
    hook_states,
    no_buffer_sync,
    prime_buckets,
    require_reduced,
    sums_in_buckets,
)
from stages.wrap.torch_engine import ModulePasses, TorchEngine

if TYPE_CHECKING:
    from stages.wrap.ddp import Ddp


def build(
    config: "Ddp", ctx: Context, model: ModelSource, precision: Precision, plan: OptimizerPlan
) -> TorchEngine:
    """Replicate the model; the same values are sent to every rank as weights are loaded."""
    model = model if plan.parts else FrozenSource(model)
    axes, device = required(config, ctx.dist.world_size), ctx.dist.device
    everyone = torch.distributed.group.WORLD
    module = build_module(ctx, model, precision, replicas=everyone, casts=True)
    group = divide_sequence(module, axes, device.type)
    live = module
    if plan.parts:  # torch's wrapper takes no model without gradients
        live = replica = DistributedDataParallel(
            module,
            device_ids=[device] if device.type == "cuda" else None,
            init_sync=False,  # every rank was loaded with the same values
            bucket_cap_mb=config.bucket_cap_mb,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            static_graph=config.static_graph,
            find_unused_parameters=config.find_unused_parameters,
            **no_buffer_sync(),
        )
        if precision.reduce != precision.master:
            reduction = ReduceIn(torch_dtype(precision.reduce), replica.process_group)
            replica.register_comm_hook(reduction, reduce_in)
        if not replica.static_graph:  # its buckets are laid out in the first real backward
            prime_buckets(replica)
    passes = ModulePasses(module, model.scorer(live, group=group), ctx.dist, axes)
    rest = passes, make_optimizers(plan, module), precision, plan
    engine = DdpEngine(replica, *rest) if plan.parts else TorchEngine(*rest)
    expected = {
        **declared_facts(ctx, precision),
        "engine": "DistributedDataParallel" if plan.parts else "none",
        "device": device.type,
    }
    verify_engine(ctx, engine, expected)
    return engine


class DdpEngine(TorchEngine):
    """A replica on every rank; gradients reduced in buckets during the last backward of a step."""

    def __init__(self, replica: DistributedDataParallel, *rest: Any) -> None:
        super().__init__(*rest)
        self._replica, self._records_graph = replica, replica.static_graph
        self._sums = BucketSums()
        self._sums.remember(replica)
        replica.zero_grad()

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        self._sums.begin(last=last)
        # torch records a static graph in the very first backward, which must then reduce; averaging
        # averaged gradients again at the end of the step changes nothing but rounding.
        reduce, self._records_graph = last or self._records_graph, False
        return contextlib.nullcontext() if reduce else self._replica.no_sync()

    def step(
        self, *, lr_scales: Sequence[float], should_step: StepGuard | None = None
    ) -> StepReport:
        require_reduced(self._replica)
        self._sums.remember(self._replica)
        return super().step(lr_scales=lr_scales, should_step=should_step)

    def describe(self) -> Mapping[str, Any]:
        reductions = [state for state in hook_states(self._replica) if isinstance(state, ReduceIn)]
        common = self.common_facts()
        reduce = [dtype_name(state.dtype) for state in reductions] or common["reduce"]
        return {"engine": type(self._replica).__name__, **common, "reduce": reduce}


@dataclass(eq=False)
class BucketSums:
    """Lets gradients of several micro-batches add up in the buckets, which exist anyway: elsewhere,
    they would take as much memory again. A single one is written there, which is faster."""

    places: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    """Each parameter's place in a bucket."""
    _begun: bool = False

    def remember(self, replica: DistributedDataParallel) -> None:
        """Remember where gradients lie in the buckets, if they can add up there."""
        if sums_in_buckets(replica):
            self.places = [(one, one.grad) for one in replica.parameters() if one.grad is not None]

    def begin(self, *, last: bool) -> None:
        """Prepare for a micro-batch, the `last` of a step or not."""
        if not last and not self._begun:
            for parameter, place in self.places:
                parameter.grad = place.zero_()
        self._begun = not last


@dataclass(frozen=True)
class ReduceIn:
    """State of the hook `reduce_in`: the dtype to reduce in, and the ranks to average over."""

    dtype: torch.dtype
    group: torch.distributed.ProcessGroup


def reduce_in(state: ReduceIn, bucket: GradBucket) -> Future[Tensor]:
    """DDP communication hook: cast a bucket, average it over all ranks, cast it back. torch's hooks
    do the same for NCCL only."""
    gradient = bucket.buffer()
    # Dividing first keeps the sum in the range of fp16.
    narrow = gradient.to(state.dtype).div_(state.group.size())
    work = torch.distributed.all_reduce(narrow, group=state.group, async_op=True)
    assert work is not None
    widened = work.get_future().then(lambda future: gradient.copy_(future.value()[0]))
    return cast(Future[Tensor], widened)
