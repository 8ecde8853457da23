"""Names of torch and transformers that are private or change: plans, placements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard


def own_plan(model: nn.Module) -> Mapping[str, str]:
    """The plan that the architecture declares: name, with `*` for a layer's number, -> style."""
    plan: Mapping[str, str] | None = getattr(model, "tp_plan", None)
    return plan or {}


def packed(dim: int, parts: int) -> Any:
    """Placement of a matrix that holds `parts` equal matrices one after the other along `dim`, each
    of which is sharded."""
    return _StridedShard(dim, split_factor=parts)


def packed_parts(placement: object) -> int:
    """Number of matrices one after the other in what `placement` shards."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def sharded_dim(placement: object) -> int | None:
    """The dimension that `placement` shards; None if it replicates."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None
