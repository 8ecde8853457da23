"""Ways to need less memory, which stages know of themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.engine import Engine
from pipeline.errors import PluginError
from pipeline.registry import Registry
from pipeline.signature import gives

METHOD = "strategies"


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
class Strategy:
    """A way to use a stage that wraps: what its class method `strategies` tells."""

    order: int
    """One of `Order`, or between two."""
    what: str
    """What it does, as in `every GPU holds everything`."""
    fields: Mapping[str, Any]


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


@dataclass(frozen=True, kw_only=True)
class Named:
    """A strategy of an installed stage."""

    name: str
    use: str
    strategy: Strategy

    @property
    def slot(self) -> dict[str, Any]:
        """What a recipe says to have it."""
        return {"use": self.use, **self.strategy.fields}


def installed_strategies(registry: Registry) -> list[Named]:
    """Those of all installed stages that give an Engine, in the order in which they are tried.
    Stages that cannot be loaded are passed over."""
    found = []
    for use in registry.names():
        try:
            kind: Any = registry.load(use)
            given = gives(kind)
        except PluginError:
            continue
        if given is not None and issubclass(given, Engine) and hasattr(kind, METHOD):
            told: Mapping[str, Strategy] = kind.strategies()
            found += [Named(name=n, use=use, strategy=s) for n, s in told.items()]
    return sorted(found, key=lambda each: (each.strategy.order, each.use))
