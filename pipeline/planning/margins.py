"""Does a forecast fit the hardware?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.planning.estimate import Estimate
from pipeline.planning.hardware_spec import FRAGMENTATION, OVERHEAD, Hardware
from pipeline.planning.timeline import Place
from pipeline.planning.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Where there is too little."""

    place: Place
    what: str
    """`memory of a GPU`, `host memory of a node`."""
    phase: str
    needed: int
    """Bytes, everything counted."""
    there: int


@dataclass(frozen=True, kw_only=True)
class Margins:
    """What a GPU loses beside tensors."""

    overhead: int = OVERHEAD
    """Bytes."""
    fragmentation: float = FRAGMENTATION
    """Share of tensors' bytes."""

    def of(self, tensors: int) -> int:
        """Bytes of a device that so many bytes of tensors take in all."""
        return round(tensors * (1 + self.fragmentation)) + self.overhead


def shortages(
    estimate: Estimate, topology: Topology, hardware: Hardware, margins: Margins
) -> Iterator[Shortage]:
    """Everything that does not fit; nothing where the hardware is not known."""
    if topology.device != "cpu" and hardware.device_memory is not None and estimate.device:
        phase, peak = max(estimate.device.items(), key=lambda item: item[1].bytes)
        needed = margins.of(peak.bytes)
        if needed > hardware.device_memory:
            yield Shortage(
                place="device",
                what="memory of a GPU",
                phase=phase,
                needed=needed,
                there=hardware.device_memory,
            )
    if hardware.host_memory is not None and estimate.host:
        phase, peak = max(estimate.host.items(), key=lambda item: item[1].bytes)
        if peak.bytes > hardware.host_memory:
            yield Shortage(
                place="host",
                what="host memory of a node",
                phase=phase,
                needed=peak.bytes,
                there=hardware.host_memory,
            )
