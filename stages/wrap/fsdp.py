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
from stages.wrap.axis_checks import Row, axis_problems
from stages.wrap.fsdp_fields import FsdpFields


@dataclass(frozen=True, kw_only=True)
class Fsdp(FsdpFields, OnAxes):
    """Shard parameters, gradients and optimizer state across ranks (torch fully_shard, FSDP2)."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from axis_problems(self, plan)
        axes = Axes.of(self, plan.procs)
        both = 0 if axes is None else axes.data * axes.context
        rows = [*self._expert_rows(both, plan), *self._sharding_rows(both, plan.procs)]
        yield from (Problem(key=key, message=text, hint=hint) for key, text, hint in rows)

    def _sharding_rows(self, both: int, procs: int) -> Iterator[Row]:
        """Settings that exclude each other; `both` ranks of all `procs` share the parameters."""
        block = self.pipeline_parallel
        if block is not None and block.schedule in SPLIT_BACKWARD and self.gathers_again:
            message = f"{block.schedule} needs parameters that stay gathered until backward"
            yield "sharding", message, "use shard_grad_op or no_shard, or choose another schedule"
        if block is not None and self.cpu_offload:
            yield "cpu_offload", "does not work with pipeline_parallel", "leave out one of them"
        if self.shard_size is not None and self.sharding != "hybrid_shard":
            yield "shard_size", "only applies to hybrid_shard", ""
        if self.shard_size is not None and both % self.shard_size:
            whole = "processes" if both == procs else f"of {procs} processes"
            yield "shard_size", f"{both} {whole} do not divide into groups of {self.shard_size}", ""
        if self.sharding == "no_shard" and self.cpu_offload:
            yield "cpu_offload", "needs sharding", "use full_shard"

    def _expert_rows(self, both: int, plan: PlanView) -> Iterator[Row]:
        """Settings under which ranks cannot divide experts."""
        key, block = "expert_parallel", self.expert_parallel
        if block is None or not both:
            return
        if self.tensor_parallel is not None and self.tensor_parallel.size > 1:
            message = "experts are not divided by tensor_parallel and by expert_parallel at once"
            yield key, message, "leave out one of them"
        if self.sharding == "no_shard":
            yield key, "needs sharding", "use full_shard"
            return
        policy, shards = plan.producer(self, Precision), self.shard_size or both
        if isinstance(policy, traits.DeclaresDtypes) and policy.reduce == "fp16":
            # torch divides sums of fp16 by another factor.
            message = "gradients of experts cannot be averaged in fp16"
            yield key, message, "set reduce: fp32 in the precision slot"
        if self.sharding == "hybrid_shard" and self.shard_size is None:
            hint = "set it to the ranks that share one copy of the model"
            yield "shard_size", "is required with expert_parallel", hint
        elif shards % block.size:
            what = f"{shards} ranks that share the parameters do not divide into groups of "
            yield f"{key}.size", f"{what}{block.size}", ""

    def run(
        self, ctx: Context, model: ModelSource, precision: Precision, optimizer: OptimizerPlan
    ) -> Engine:
        from stages.wrap.fsdp_engine import build

        return build(self, ctx, model, precision, optimizer)
