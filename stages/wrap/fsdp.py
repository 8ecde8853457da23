"""Fully sharded data parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

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
from stages.wrap.axes import (
    SPLIT_BACKWARD,
    Axes,
    ContextParallel,
    ExpertParallel,
    OnAxes,
    PipelineParallel,
    TensorParallel,
    axis_sizes,
)
from stages.wrap.axis_checks import Row, axis_problems


@dataclass(frozen=True, kw_only=True)
class Fsdp(OnAxes):
    """Shard parameters, gradients and optimizer state across ranks (torch fully_shard, FSDP2)."""

    sharding: Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"] = "full_shard"
    """full_shard gathers parameters again in backward; shard_grad_op keeps them gathered from
    forward to backward; hybrid_shard shards within groups of `shard_size` ranks and replicates
    across them; no_shard replicates everything."""

    shard_size: Annotated[int, Gt(0)] | None = None
    """With hybrid_shard: ranks that share one copy of the model, or of its part on a rank of the
    other axes; null means a node's ranks."""

    units: Literal["block"] | tuple[str, ...] = "block"
    """Modules whose parameters are gathered together: each transformer block, the input embedding
    and the head, or modules of the named classes; in either case the rest is one more. An embedding
    and a head with one weight are part of the rest."""

    forward_prefetch: Annotated[int, Ge(0)] = 0
    """Units to gather ahead explicitly in forward; 0 leaves it to torch's own overlap, except with
    expert_parallel, where the host waits for the routing in every block and one is gathered."""

    backward_prefetch: Annotated[int, Gt(0)] = 1
    """Units to gather ahead in backward; 1 is torch's own schedule."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory and step there."""

    pin_memory: bool = True
    """With cpu_offload on a GPU: use page-locked host memory, which copies faster."""

    reduce_every_microbatch: bool = True
    """While accumulating, reduce each micro-batch's gradients, so that they stay sharded; false
    reduces once a step and holds whole gradients on every rank meanwhile, as a pipeline does."""

    pipeline_parallel: PipelineParallel | None = None
    """Put consecutive blocks of the model on each rank; null puts all blocks on every rank."""

    tensor_parallel: TensorParallel | None = None
    """Divide the matrices of every layer among ranks; null puts whole layers on every rank."""

    context_parallel: ContextParallel | None = None
    """Divide the tokens of every sample among ranks; null keeps each sample on one rank."""

    expert_parallel: ExpertParallel | None = None
    """Put some of a mixture's experts on each rank; null puts all of them on every rank."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from axis_problems(self, plan)
        both = self.data_ranks(plan.procs) * axis_sizes(self).get("context", 1)
        rows, block = [*self._expert_rows(both, plan)], self.pipeline_parallel
        if block is not None and block.schedule in SPLIT_BACKWARD and self.gathers_again:
            message = f"{block.schedule} needs parameters that stay gathered until backward"
            hint = "use shard_grad_op or no_shard, or choose another schedule"
            rows.append(("sharding", message, hint))
        if block is not None and self.cpu_offload:
            message = "does not work with pipeline_parallel"
            rows.append(("cpu_offload", message, "leave out one of them"))
        if self.shard_size is not None and self.sharding != "hybrid_shard":
            rows.append(("shard_size", "only applies to hybrid_shard", ""))
        if self.shard_size is not None and both % self.shard_size:
            whole = "processes" if both == plan.procs else f"of {plan.procs} processes"
            message = f"{both} {whole} do not divide into groups of {self.shard_size}"
            rows.append(("shard_size", message, ""))
        if self.sharding == "no_shard" and self.cpu_offload:
            rows.append(("cpu_offload", "needs sharding", "use full_shard"))
        yield from (Problem(key=key, message=text, hint=hint) for key, text, hint in rows)

    def _expert_rows(self, both: int, plan: PlanView) -> Iterator[Row]:
        """Settings under which ranks cannot divide experts; `both` ranks share the parameters."""
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

    @property
    def gathers_again(self) -> bool:
        """Whether units are gathered for forward, and again for backward."""
        return self.sharding in ("full_shard", "hybrid_shard")

    def shards(self, axes: Axes, local_ranks: int) -> int:
        """Number of ranks that share one copy of the parameters, given the number on a node."""
        if self.sharding == "no_shard":
            return 1
        both = axes.data * axes.context
        if self.sharding != "hybrid_shard":
            return both
        # A node's ranks may be more than those of an axis, or of a pipeline stage.
        return self.shard_size or min(max(local_ranks // axes.tensor, 1), both)

    def run(
        self, ctx: Context, model: ModelSource, precision: Precision, optimizer: OptimizerPlan
    ) -> Engine:
        from stages.wrap.fsdp_engine import build

        return build(self, ctx, model, precision, optimizer)
