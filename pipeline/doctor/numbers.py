"""GPUs' numbers: in a report they are those of nvidia-smi, whatever a process here sees of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


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
