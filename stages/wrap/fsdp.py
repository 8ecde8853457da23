"""Fully sharded data parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline import (
    Context,
    Engine,
    ModelSource,
    OptimizerPlan,
    PlanView,
    Precision,
    Problem,
    traits,
)
from stages.wrap.axes import SPLIT_BACKWARD, Axes, OnAxes
from stages.wrap.axis_checks import axis_problems
from stages.wrap.fsdp_fields import FsdpFields


@dataclass(frozen=True, kw_only=True)
class Fsdp(FsdpFields, OnAxes):
    """Shard parameters, gradients and optimizer state across ranks (torch fully_shard, FSDP2)."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from axis_problems(self, plan)
        found = Axes.of(self, plan.procs)
        both = 0 if found is None else found.data * found.context
        if self.expert_parallel is not None and found is not None:
            size, shards = self.expert_parallel.size, self.shard_size or both
            yield from self._expert_problems(size, shards, plan)
        block = self.pipeline_parallel
        if block is not None and block.schedule in SPLIT_BACKWARD and self.gathers_again:
            message = f"{block.schedule} needs parameters that stay gathered until backward"
            hint = "use shard_grad_op or no_shard, or choose another schedule"
            yield Problem(message=message, key="sharding", hint=hint)
        if block is not None and self.cpu_offload:
            message = "does not work with pipeline_parallel"
            yield Problem(message=message, key="cpu_offload", hint="leave out one of them")
        if self.shard_size is not None and self.sharding != "hybrid_shard":
            yield Problem(message="only applies to hybrid_shard", key="shard_size")
        if self.shard_size is not None and both % self.shard_size:
            whole = "processes" if both == plan.procs else f"of {plan.procs} processes"
            message = f"{both} {whole} do not divide into groups of {self.shard_size}"
            yield Problem(message=message, key="shard_size")
        if self.sharding == "no_shard" and self.cpu_offload:
            yield Problem(message="needs sharding", key="cpu_offload", hint="use full_shard")

    def _expert_problems(self, size: int, shards: int, plan: PlanView) -> Iterator[Problem]:
        """Settings under which `shards` ranks cannot divide experts among each `size` of them."""
        if self.tensor_parallel is not None and self.tensor_parallel.size > 1:
            message = "experts are not divided by tensor_parallel and by expert_parallel at once"
            yield Problem(message=message, key="expert_parallel", hint="leave out one of them")
        if self.sharding == "no_shard":
            yield Problem(message="needs sharding", key="expert_parallel", hint="use full_shard")
            return
        policy = plan.producer(self, Precision)
        if isinstance(policy, traits.DeclaresDtypes) and policy.reduce == "fp16":
            # torch divides sums of fp16 by another factor.
            message = "gradients of experts cannot be averaged in fp16"
            yield Problem(
                message=message,
                key="expert_parallel",
                hint="set reduce: fp32 in the precision slot",
            )
        if self.sharding == "hybrid_shard" and self.shard_size is None:
            hint = "set it to the ranks that share one copy of the model"
            yield Problem(message="is required with expert_parallel", key="shard_size", hint=hint)
        elif shards % size:
            what = f"{shards} ranks that share the parameters do not divide into groups of {size}"
            yield Problem(message=what, key="expert_parallel.size")

    def run(
        self, ctx: Context, model: ModelSource, precision: Precision, optimizer: OptimizerPlan
    ) -> Engine:
        from stages.wrap.fsdp_engine import build

        return build(self, ctx, model, precision, optimizer)
