"""wrap.ddp for a trace: what DistributedDataParallel replicates, with its buckets.

Its reducer reads the addresses of gradients, which tensors without values do not have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipeline.artifacts import ModelSource, OptimizerPlan, Precision, torch_dtype
from pipeline.engine import DataShard
from pipeline.stage import Context
from stages.wrap.birth import build_empty, cast_buffers, materialise, named_parameters, trained
from stages.wrap.compute_cast import cast_on_use
from stages.wrap.ddp_buckets import cut
from stages.wrap.gradients import make_optimizer, make_scaler
from stages.wrap.torch_engine import TorchEngine

if TYPE_CHECKING:
    from stages.wrap.ddp import Ddp


def build(
    config: Ddp, ctx: Context, model: ModelSource, precision: Precision, plan: OptimizerPlan
) -> TorchEngine:
    """As the real engine is built, but for the weights' values."""
    module = build_empty(model, precision)
    materialise(module, ctx.dist.device, buffer_device=ctx.dist.device)
    cast_buffers(module, precision)
    if precision.compute != precision.master:
        cast_on_use(module, torch_dtype(precision.compute))
    return TracedReplica(module, config, ctx, precision, plan)


class TracedReplica(TorchEngine):
    """One replica, and the buckets beside it."""

    def __init__(
        self,
        module: nn.Module,
        config: Ddp,
        ctx: Context,
        precision: Precision,
        plan: OptimizerPlan,
    ) -> None:
        self.model = module
        self.device = ctx.dist.device
        self.shard = DataShard(index=ctx.dist.rank, count=ctx.dist.world_size)
        self.optimizer = make_optimizer(plan, plan.groups(named_parameters(module)))
        self.scaler = make_scaler(precision, self.device)
        self.plan = plan
        self.keeps_gradients = (
            config.gradient_as_bucket_view
            and not config.find_unused_parameters
            and not config.static_graph
        )
        self._reduces = True
        narrow = precision.reduce != precision.master
        self._buckets = [
            _Bucket(
                parameters,
                views=config.gradient_as_bucket_view,
                reduce=torch_dtype(precision.reduce) if narrow else None,
            )
            for parameters in cut(
                list(trained(module)), lambda one: one.nbytes, config.bucket_cap_mb << 20
            )
        ]
        for bucket in self._buckets:
            for parameter in bucket.views:
                parameter.register_post_accumulate_grad_hook(self._came(bucket))  # type: ignore[no-untyped-call]
        if not config.static_graph:
            self._settle()

    def _settle(self) -> None:
        """What `settle_buckets` does."""
        nothing: Any = sum(parameter.sum() * 0.0 for parameter in trained(self.model))
        nothing.backward()
        self.optimizer.zero_grad()

    def _came(self, bucket: _Bucket) -> Any:
        def came(parameter: nn.Parameter) -> None:
            if self._reduces:
                bucket.take(parameter)

        return came

    @property
    def module(self) -> nn.Module:
        return self.model

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        self._reduces = last
        yield

    def facts(self) -> Mapping[str, Any]:
        return {"engine": type(self).__name__, **self.common_facts()}


class _Bucket:
    """Gradients that are reduced together."""

    def __init__(
        self, parameters: list[nn.Parameter], *, views: bool, reduce: torch.dtype | None
    ) -> None:
        first = parameters[0]
        sizes = [parameter.numel() for parameter in parameters]
        self._buffer = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        parts = torch.split(self._buffer, sizes)
        self.views = {
            parameter: part.view_as(parameter)
            for parameter, part in zip(parameters, parts, strict=True)
        }
        self._keep_views = views
        self._reduce = reduce
        self._missing = set(parameters)

    def take(self, parameter: nn.Parameter) -> None:
        """A gradient is there; the last one sends the bucket off."""
        view = self.views[parameter]
        if parameter.grad is not None and parameter.grad is not view:
            view.copy_(parameter.grad)
            if self._keep_views:
                parameter.grad = view
        self._missing.discard(parameter)
        if not self._missing:
            self._missing = set(self.views)
            self._send()

    def _send(self) -> Tensor:
        return self._buffer if self._reduce is None else self._buffer.to(self._reduce)
