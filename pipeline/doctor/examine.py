"""Fill a MachineReport: the inventory and the measurements."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.doctor.collectives import bandwidth
from pipeline.doctor.inventory import environment, folders, host, kernel, network
from pipeline.doctor.report import Device, Folder, MachineReport, Matmul
from pipeline.doctor.session import FULL, QUICK, Session
from pipeline.doctor.software import gpu_uuids, operators, software, topology
from pipeline.errors import UsageError
from pipeline.hardware.gpus import gpu_count
from pipeline.hardware.host import total_memory, usable_cores
from pipeline.utils.text import plural


def examine(
    runs: Path, *, procs: int | None, quick: bool, say: Callable[[str], None]
) -> MachineReport:
    """Inspect and measure this machine with `procs` processes (None: one per GPU, or two).

    `say` is called with the name of each measurement. Raises UsageError if `procs` is more than the
    GPUs.
    """
    places = folders(runs)
    session = Session(
        budget=QUICK if quick else FULL, say=say, gpus=gpu_count() > 0, scratch=_scratch(places)
    )
    torch = session.torch()
    devices = _devices(torch.get("devices", ()), gpu_uuids())
    session.procs = _procs(procs, len(devices))
    if devices:
        session.use_gpus()
    return MachineReport(
        **_measure(session, places[0]),
        device=session.device,
        devices=devices,
        procs=session.procs,
        taken=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        host_memory_bytes=total_memory(),
        host=host(),
        topology=topology([device.number for device in devices]),
        network=network(),
        software=software(torch),
        operators=operators(),
        kernel=kernel(),
        folders=places,
        environment=environment(os.environ),
        failures=tuple(session.failures),
    )


def _measure(session: Session, runs: Folder) -> dict[str, Any]:
    """The report's measured fields."""
    rates = session.disk(runs)
    matmul = session.matmul()
    rates |= session.copies()
    fields: dict[str, Any] = {"allreduce": [], "allgather": []}
    for record in session.collectives():
        name = record["operation"]
        result = bandwidth(name, record["bytes"], record["seconds"], session.procs)
        fields[name].append(result)
    for name in MachineReport.model_fields:
        if name.endswith("_bytes_per_s"):
            fields[name] = rates.get(name)
    return {**fields, "matmul_flops": Matmul(**{"fp32": None, "bf16": None, **matmul})}


def _scratch(places: Iterable[Folder]) -> str | None:
    """The folder of runs if temporary files cannot be written, else None."""
    usable = {place.use: place.path for place in places if place.writable}
    return None if "temporary files" in usable else usable.get("runs")


def _devices(found: Sequence[Mapping[str, Any]], uuids: Mapping[int, str]) -> tuple[Device, ...]:
    """torch's devices with nvidia-smi's numbers, if it knows the UUIDs of all."""
    numbers = {uuid: number for number, uuid in uuids.items()}
    known = all(device.get("uuid") in numbers for device in found)
    return tuple(
        Device(**device, number=numbers[device["uuid"]] if known else None) for device in found
    )


def _procs(procs: int | None, gpus: int) -> int:
    if gpus and procs is not None and procs > gpus:
        raise UsageError(
            f"--procs {procs}, but this machine has {plural(gpus, 'GPU')}",
            hint="measure its processors instead: CUDA_VISIBLE_DEVICES= pipe doctor",
        )
    return procs or gpus or max(1, min(2, int(usable_cores())))
