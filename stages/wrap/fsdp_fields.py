"""Fields of wrap.fsdp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from stages.wrap.axes import (
    Axes,
    ContextParallel,
    ExpertParallel,
    PipelineParallel,
    TensorParallel,
)

Sharding = Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"]


@dataclass(frozen=True, kw_only=True)
class FsdpFields:
    """Fields of `Fsdp`, for all that it is made of."""

    sharding: Sharding = "full_shard"
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
