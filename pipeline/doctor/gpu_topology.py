"""Read how GPUs are linked from the table that `nvidia-smi topo -m` prints.

    GPU0  GPU1  NIC0  CPU Affinity  NUMA Affinity  GPU NUMA ID
    GPU0   X    NV18  PIX           0-47           0              N/A

Cells are separated by tabs, or by blanks if the table was pasted. Newer drivers underline the
header with terminal codes.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from pipeline.doctor.report import Link, Topology

_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")


def parse_topology(text: str) -> Topology:
    """Links between GPUs, each pair once, and the GPUs' NUMA nodes; empty without a table."""
    lines = [line.split() for line in _TERMINAL_CODES.sub("", text).splitlines()]
    header = next((i for i, cells in enumerate(lines) if cells and _is_header(cells)), None)
    if header is None:
        return Topology()
    columns = lines[header]
    if "CPU" in columns:  # "CPU Affinity" follows the devices
        columns = columns[: columns.index("CPU")]
    links, numa = [], {}
    for cells in lines[header + 1 :]:
        if not cells or not _GPU.fullmatch(cells[0]):
            break
        own, kinds, rest = cells[0], cells[1 : len(columns) + 1], cells[len(columns) + 1 :]
        for other, kind in zip(columns, kinds, strict=False):
            if _GPU.fullmatch(other) and columns.index(own) < columns.index(other):
                links.append(Link(a=own, b=other, kind=kind))
        if len(rest) > 1 and rest[1] != "N/A":
            numa[own] = rest[1]
    return Topology(links=tuple(links), numa=numa)


def _is_header(cells: list[str]) -> bool:
    # the first row begins like the header, but continues with X
    return bool(_GPU.fullmatch(cells[0])) and (len(cells) == 1 or cells[1] != "X")


def among(topology: Topology, numbers: Collection[int]) -> Topology:
    """The part of the topology that is between the GPUs with these numbers."""
    names = {f"GPU{number}" for number in numbers}
    links = tuple(link for link in topology.links if {link.a, link.b} <= names)
    numa = {gpu: node for gpu, node in topology.numa.items() if gpu in names}
    return Topology(links=links, numa=numa)


def is_nvlink(link: Link) -> bool:
    """Whether NVLink connects the pair: NV4 is four NVLinks; NODE and others are PCIe."""
    return re.fullmatch(r"NV\d+", link.kind) is not None
