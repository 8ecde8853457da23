"""Where a run is to happen: processes, nodes, devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Topology:
    """What a planner is told besides what other planners have told."""

    ranks: int
    """Processes over all nodes, one a device."""
    local_ranks: int
    """Processes of one node."""
    device: str
    """`cpu` or `cuda`."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.ranks // self.local_ranks)

    @property
    def on_node(self) -> int:
        """Processes of the fullest node."""
        return min(self.local_ranks, self.ranks)
