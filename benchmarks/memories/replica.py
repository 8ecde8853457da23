"""A stand-in for `wrap.ddp` in the oracle, and DDP's buckets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import (
    _DEFAULT_FIRST_BUCKET_BYTES,
    _compute_bucket_assignment_by_size,
)

from pipeline import Context, ModelSource, OptimizerPlan, Precision, torch_dtype
from stages.wrap.axes import required
from stages.wrap.build import build_module
from stages.wrap.context_compat import divide_sequence
from stages.wrap.ddp import Ddp
from stages.wrap.ddp_engine import BucketSums
from stages.wrap.optimizer_state import make_optimizers
from stages.wrap.torch_engine import ModulePasses, TorchEngine


class TracedReplica(TorchEngine):
    """A replica with DDP's buckets, for a trace: DDP's own reducer reads addresses of gradients,
    which tensors without values do not have.

    Gradients are views of the buckets, or beside them. A bucket is sent when the gradient of its
    last weight arrives, which is the last to arrive, or nearly.
    """

    def __init__(
        self,
        ddp: Ddp,
        ctx: Context,
        model: ModelSource,
        precision: Precision,
        plan: OptimizerPlan,
    ) -> None:
        module = build_module(ctx, model, precision, casts=True)
        axes = required(ddp, ctx.dist.world_size)
        group = divide_sequence(module, axes, ctx.dist.device.type)
        passes = ModulePasses(module, model.scorer(module, group=group), ctx.dist, axes)
        super().__init__(passes, make_optimizers(plan, module), precision, plan)
        self._views, self._sent_in = ddp.gradient_as_bucket_view, torch_dtype(precision.reduce)
        self._sums, self._reduces = BucketSums(), True
        trained = (one for one in module.parameters() if one.requires_grad)
        for bucket in buckets(trained, ddp.bucket_cap_mb << 20):
            places = self._reduce_together(bucket)
            self._sums.places += places.items() if ddp.sums_in_buckets else ()

    def _reduce_together(self, weights: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Make a bucket; return each weight's place in it."""
        sizes = [weight.numel() for weight in weights]
        bucket = torch.zeros(sum(sizes), dtype=weights[0].dtype, device=self.device)
        parts = torch.split(bucket, sizes)
        places = {one: part.view_as(one) for one, part in zip(weights, parts, strict=True)}

        def arrived(weight: Tensor) -> None:
            if self._reduces and self._views:
                weight.grad = places[weight]
            if self._reduces and weight is weights[-1]:
                bucket.to(self._sent_in)

        for weight in weights:
            weight.register_post_accumulate_grad_hook(arrived)
        return places

    @contextlib.contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        self._sums.begin(last=last)
        self._reduces = last
        yield


def buckets(parameters: Iterable[nn.Parameter], cap: int) -> list[list[nn.Parameter]]:
    """Return DDP's buckets: parameters from the last to the first, `cap` bytes or a little more
    each, the first of torch's own capacity."""
    last_first = list(parameters)[::-1]
    limits = [_DEFAULT_FIRST_BUCKET_BYTES, cap]
    found, _ = _compute_bucket_assignment_by_size([*last_first], limits)
    return [[last_first[number] for number in bucket] for bucket in found]
