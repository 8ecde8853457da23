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


def parse_topology(text: str, numbers: Collection[int]) -> Topology:
    """Links between the GPUs with these numbers, each pair once, and the GPUs' NUMA nodes."""
    gpus = {f"GPU{number}" for number in numbers}
    lines = [line.split() for line in _TERMINAL_CODES.sub("", text).splitlines()]
    table = [cells for cells in lines if cells and _GPU.fullmatch(cells[0])]
    if not table or "X" in table[0]:  # no header
        return Topology()
    columns = table[0][: table[0].index("CPU")] if "CPU" in table[0] else table[0]
    links, numa = [], {}
    for own, *cells in table[1:]:
        kinds, rest = cells[: len(columns)], cells[len(columns) :]
        for other, kind in zip(columns, kinds, strict=False):
            if {own, other} <= gpus and columns.index(own) < columns.index(other):
                links.append(Link(a=own, b=other, kind=kind))
        if own in gpus and len(rest) > 1 and rest[1] != "N/A":
            numa[own] = rest[1]
    return Topology(links=tuple(links), numa=numa)
