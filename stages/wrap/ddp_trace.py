"""wrap.ddp for a trace: a replica, and what DistributedDataParallel holds beside it.

Its own reducer reads the addresses of gradients, which tensors without values do not have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.contracts.engine import DataAxis
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.precision import Precision, torch_dtype
from pipeline.contracts.stage import Context
from stages.wrap.compute_cast import cast_on_use
from stages.wrap.ddp import Ddp
from stages.wrap.materialize import (
    build_empty,
    cast_buffers,
    materialize,
    named_parameters,
    trained,
)
from stages.wrap.optimizer_step import make_optimizer, make_scaler
from stages.wrap.torch_compat import cut
from stages.wrap.torch_engine import TorchEngine


class TracedReplica(TorchEngine):
    """A replica with its buckets. Gradients are views of them, or beside them; a bucket is sent
    when the gradient of its last weight has come, which is the last, or nearly."""

    def __init__(
        self, ddp: Ddp, ctx: Context, model: ModelSource, precision: Precision, plan: OptimizerPlan
    ) -> None:
        self.device, self.plan = ctx.dist.device, plan
        self.model = build_empty(model, precision)
        materialize(self.model, self.device, buffer_device=self.device)
        cast_buffers(self.model, precision)
        if precision.compute != precision.master:
            cast_on_use(self.model, torch_dtype(precision.compute))
        self.shard = DataAxis(index=ctx.dist.rank, count=ctx.dist.world_size)
        self.optimizer = make_optimizer(plan, plan.groups(named_parameters(self.model)))
        self.scaler = make_scaler(precision, self.device)
        views, changes = ddp.gradient_as_bucket_view, ddp.find_unused_parameters
        self.keeps_gradients = views and not changes and not ddp.static_graph
        self._reduces, sent = True, torch_dtype(precision.reduce)
        weights, cap = [*trained(self.model)], ddp.bucket_cap_mb << 20
        for bucket in cut(weights, lambda weight: weight.nbytes, cap):
            self._reduce_together(bucket, views, sent)

    def _reduce_together(self, weights: list[nn.Parameter], views: bool, sent: torch.dtype) -> None:
        sizes = [weight.numel() for weight in weights]
        bucket = torch.zeros(sum(sizes), dtype=weights[0].dtype, device=self.device)
        parts = dict(zip(weights, torch.split(bucket, sizes), strict=True))

        def came(weight: Tensor) -> None:
            if self._reduces and views:
                weight.grad = parts[weight].view_as(weight)  # type: ignore[index]
            if self._reduces and weight is weights[-1]:
                bucket.to(sent)

        for weight in weights:
            weight.register_post_accumulate_grad_hook(came)  # type: ignore[no-untyped-call]

    @property
    def module(self) -> nn.Module:
        return self.model

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        self._reduces = last
        yield

    def describe(self) -> Mapping[str, Any]:
        return self.common_facts()
