"""Ways to need less memory, which stages know of themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Order:
    """Places in the order in which strategies are tried: the faster, which need more memory, first.
    Those from OFFLOADED on are tried only when none before them fits, one after another."""

    REPLICATED = 10
    SHARDED_WITHIN_NODES = 20
    """Only across nodes."""
    PARTLY_SHARDED = 30
    """Gathered once a step."""
    SHARDED = 40
    OFFLOADED = 50
    MORE_OFFLOADED = 55
    OFFLOADED_TO_DISK = 60


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A change of a stage's own fields with which a step needs less memory: what its method
    `savings` tells."""

    order: int
    """Which is tried first, over all stages; those of one kind have the same."""
    what: str
    fields: Mapping[str, Any]


class Saver(Protocol):
    """A stage that can do with less."""

    def savings(self, ranks: int) -> Iterator[Saving]: ...


REDUCE, RECOMPUTE, CHUNK, SMALLER = 1, 2, 3, 4
"""Orders of savings: gradients reduced more often, activations computed again, logits in chunks,
smaller micro-batches."""
