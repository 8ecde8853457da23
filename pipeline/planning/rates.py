"""Where the rates come from that a step's time is told with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.planning.hardware_spec import Hardware
from pipeline.planning.step_time import COMPUTE, DISK, DOWN, MEMORY, NETWORK, UP, StepTime, crosses
from pipeline.planning.strategy import Traffic
from pipeline.planning.topology import Topology

MEASURED = "at the rates that were measured"
ASKED = "at the rates that were asked for"
SHEETS = "at the rates of data sheets, which no program reaches"
FIELDS = {
    COMPUTE: "flops", MEMORY: "bandwidth", UP: "host_link", DOWN: "host_link", DISK: "disk_rate",
}  # fmt: skip
"""Resource -> the hardware's field for its rate."""


def origins(
    time: StepTime, traffic: Sequence[Traffic], topology: Topology, hardware: Hardware
) -> dict[str, list[str]]:
    """Where rates come from -> the parts of the step whose rates do."""
    found: dict[str, list[str]] = {MEASURED: [], ASKED: [], SHEETS: []}
    for part in time.parts:
        uses = _network(traffic, topology, hardware) if part == NETWORK else [(part, FIELDS[part])]
        for name, field in uses:
            found[_origin(field, hardware)].append(name)
    return {origin: names for origin, names in found.items() if names}


def in_words(found: dict[str, list[str]]) -> str:
    """Of all parts, the last as the rest."""
    *named, last = found
    words = [f"{', '.join(found[origin])} {origin}" for origin in named]
    return ", ".join([*words, f"the rest {last}"]) if named else last


def _network(
    traffic: Sequence[Traffic], topology: Topology, hardware: Hardware
) -> Iterator[tuple[str, str]]:
    """Its links that are used, whose rates are known."""
    across = {crosses(one, topology) for one in traffic if one.ranks > 1}
    inside = False in across and hardware.peers is not None
    between = True in across and hardware.network is not None
    if inside:
        yield NETWORK + " inside nodes" * between, "peers"
    if between:
        yield NETWORK + " between nodes" * inside, "network"


def _origin(field: str, hardware: Hardware) -> str:
    if field in hardware.measured:
        return MEASURED
    return ASKED if field in hardware.asked else SHEETS
