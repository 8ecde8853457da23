"""Where a recipe's ranks are, and how they divide a model among themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.contracts.data import MicroBatch


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Number of ranks and nodes of a run, and its device."""

    ranks: int
    """Processes over all nodes, one a device."""
    local_ranks: int
    """Processes of one node."""
    device: str
    """`cpu` or `cuda`."""
    shares: int | None = None
    """Number of data-parallel ranks; None: all."""
    stages: int = 1
    """Ranks of a pipeline."""

    @property
    def data_ranks(self) -> int:
        """Number of ranks among which the samples of a step are divided."""
        return self.ranks if self.shares is None else self.shares

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.ranks // self.local_ranks)

    @property
    def on_node(self) -> int:
        """Processes of the fullest node."""
        return min(self.local_ranks, self.ranks)


class Division(ABC):
    """How a strategy divides a model among ranks before it shards what each of them has, so that a
    profile is that of one rank's part."""

    stages: int = 1
    """Ranks of a pipeline."""

    @property
    @abstractmethod
    def key(self) -> Mapping[str, Any]:
        """Everything that the part depends on, as JSON."""

    @abstractmethod
    def divide(self, model: Any, blocks: Sequence[Any]) -> Mapping[str, str]:
        """Divide a model, whose parameters are on the meta device, in place, in a process group of
        all ranks that sends nothing. Returns what is exchanged by the name of each group."""

    @abstractmethod
    def experts(self, model: Any) -> Mapping[str, int]:
        """Weights that ranks divide by experts -> number of these ranks."""

    @abstractmethod
    def own(self, batch: MicroBatch) -> MicroBatch:
        """Return the first rank's part of a micro-batch."""
