"""How GPUs reach each other: the table that `nvidia-smi topo -m` prints.

    GPU0  GPU1  NIC0  CPU Affinity  NUMA Affinity  GPU NUMA ID
    GPU0   X    NV18  PIX           0-47           0              N/A

Cells are separated by tabs, or by blanks where the table was pasted. Newer drivers underline the
header with terminal codes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pipeline.doctor.report import Link, Topology

_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")


def parse_topology(text: str) -> Topology:
    """Links between GPUs, each pair once, and the GPUs' memory nodes. Empty if there is no such
    table."""
    lines = [line.split() for line in _TERMINAL_CODES.sub("", text).splitlines()]
    header = next((i for i, cells in enumerate(lines) if cells and _is_header(cells)), None)
    if header is None:
        return Topology()
    columns = _columns(lines[header])
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


def among(topology: Topology, numbers: Collection[int]) -> Topology:
    """What there is of it between the GPUs of these numbers."""
    names = {f"GPU{number}" for number in numbers}
    links = tuple(link for link in topology.links if {link.a, link.b} <= names)
    numa = {gpu: node for gpu, node in topology.numa.items() if gpu in names}
    return Topology(links=links, numa=numa)


def _is_header(cells: list[str]) -> bool:
    # the first row of the table begins like its header, and goes on with X
    return bool(_GPU.fullmatch(cells[0])) and (len(cells) == 1 or cells[1] != "X")


def _columns(cells: list[str]) -> list[str]:
    """Devices; "CPU Affinity" and what follows are none."""
    return cells[: cells.index("CPU")] if "CPU" in cells else cells


def is_nvlink(link: Link) -> bool:
    """NV4 is four NVLinks; NODE and the like go over PCIe."""
    return re.fullmatch(r"NV\d+", link.kind) is not None


def seen(
    devices: Sequence[Mapping[str, Any]], uuids: Mapping[int, str], chosen: str | None
) -> list[int]:
    """The numbers of the GPUs that a process here sees, in its order.

    `devices` are those that torch has told; without any, or where nvidia-smi does not know them
    (`uuids`, by number), they are the ones that CUDA_VISIBLE_DEVICES=`chosen` leaves (None: unset).
    """
    # By UUID: unless CUDA_DEVICE_ORDER says otherwise, CUDA counts the fastest kind first.
    numbers = {uuid: number for number, uuid in uuids.items()}
    found = [numbers.get(device.get("uuid", "")) for device in devices]
    known = [number for number in found if number is not None]
    return known if devices and len(known) == len(devices) else visible(uuids, chosen)


def visible(uuids: Mapping[int, str], chosen: str | None) -> list[int]:
    """What CUDA_VISIBLE_DEVICES=`chosen` leaves: numbers or beginnings of UUIDs, up to the first
    entry that names no GPU or several, none if one comes twice. A part of a GPU (MIG-...) is no GPU
    here: no link leads to it.

    https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html
    """
    if chosen is None:
        return list(uuids)
    found = list(_named(uuids, chosen))
    return found if len(set(found)) == len(found) else []


def _named(uuids: Mapping[int, str], chosen: str) -> Iterator[int]:
    for entry in map(str.strip, chosen.split(",")):
        if number := re.match(r"\d+", entry):  # CUDA passes over what follows the digits
            found = [int(number[0])] if int(number[0]) in uuids else []
        else:
            known = uuids.items() if entry.startswith("GPU-") else ()
            found = [n for n, uuid in known if uuid.startswith(entry)]
        if len(found) != 1:
            return
        yield found[0]
