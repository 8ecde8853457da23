"""Ways to need less memory, which stages know of themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Order:
    """Places in the order in which strategies are tried: the faster first."""

    REPLICATED = 10
    PARTLY_SHARDED = 20
    """Only where few weights are trained."""
    SHARDED = 30
    SHARDED_WITHIN_NODES = 40
    """Only across nodes, in place of SHARDED: needs more memory, sends less between nodes."""
    OFFLOADED = 50
    MORE_OFFLOADED = 55
    OFFLOADED_TO_DISK = 60


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A change of a stage's own fields that needs less memory: what its method `savings` tells."""

    order: int
    """Cheaper ones first, over all stages."""
    what: str
    fields: Mapping[str, Any]


class Saver(Protocol):
    """A stage that can do with less."""

    def savings(self, ranks: int) -> Iterator[Saving]: ...


RECOMPUTE, CHUNK, SMALLER = 1, 2, 3
"""Orders of savings: activations computed again, logits in chunks, smaller micro-batches."""
