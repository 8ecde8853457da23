"""Fill a MachineReport: the inventory, and what was measured."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.doctor import collectives
from pipeline.doctor.gpu_topology import seen
from pipeline.doctor.inventory import environment, folders, host, kernel, network
from pipeline.doctor.report import Collective, Device, Folder, MachineReport, Matmul
from pipeline.doctor.session import FULL, QUICK, Session
from pipeline.doctor.software import gpu_uuids, operators, software, topology
from pipeline.errors import UsageError
from pipeline.hardware.gpus import gpu_count
from pipeline.hardware.host import total_memory, usable_cores


def examine(
    runs: Path, *, procs: int | None, quick: bool, say: Callable[[str], None]
) -> MachineReport:
    """Look at this machine and measure it with `procs` processes (None: one per GPU, or two).

    `say` is told what is measured next. Raises UsageError if there are fewer GPUs than `procs`.
    """
    places = folders(runs)
    session = Session(
        pace=QUICK if quick else FULL, say=say, gpus=gpu_count() > 0, scratch=_scratch(places)
    )
    torch = session.torch()
    told = torch.get("devices", ())
    numbers = seen(told, gpu_uuids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    devices = _devices(told, numbers)
    session.procs = _count(procs, len(devices))
    if devices:
        session.use_gpus()
    disk = session.disk(places[0])
    matmul = session.matmul()
    copies = session.copies()
    buses = session.collectives()
    return MachineReport(
        device=session.device,
        devices=devices,
        procs=session.procs,
        taken=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        host_memory_bytes=total_memory(),
        matmul_flops=Matmul.model_validate({"fp32": None, "bf16": None, **matmul}),
        allreduce=_collectives("allreduce", collectives.allreduce, buses, session.procs),
        allgather=_collectives("allgather", collectives.allgather, buses, session.procs),
        **_rates(("host_copy", "h2d", "d2h", "h2d_pageable", "d2h_pageable"), copies),
        **_rates(("disk_write", "disk_read"), disk),
        host=host(),
        topology=topology(numbers),
        network=network(),
        software=software(torch),
        operators=operators(),
        kernel=kernel(),
        folders=places,
        environment=environment(os.environ),
        failures=tuple(session.failures),
    )


def _scratch(places: Iterable[Folder]) -> str | None:
    """Without temporary files, what can be measured is measured where runs are written."""
    usable = {place.use: place.path for place in places if place.writable}
    return None if "temporary files" in usable else usable.get("runs")


def _devices(told: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> tuple[Device, ...]:
    """With nvidia-smi's numbers, where it has one for each."""
    known = numbers if len(numbers) == len(told) else [None] * len(told)
    return tuple(
        Device.model_validate({**each, "number": number})
        for each, number in zip(told, known, strict=True)
    )


def _count(procs: int | None, gpus: int) -> int:
    if gpus and procs is not None and procs > gpus:
        raise UsageError(
            f"--procs {procs}, but this machine has {gpus} {'GPU' if gpus == 1 else 'GPUs'}",
            hint="measure its processors instead: CUDA_VISIBLE_DEVICES= pipe doctor",
        )
    return procs or gpus or max(1, min(2, int(usable_cores())))


def _collectives(
    name: str,
    make: Callable[[int, float, int], Collective],
    records: Iterable[Mapping[str, Any]],
    procs: int,
) -> tuple[Collective, ...]:
    mine = [record for record in records if record["operation"] == name]
    return tuple(make(record["bytes"], record["seconds"], procs) for record in mine)


def _rates(names: Iterable[str], found: Mapping[str, float]) -> dict[str, Any]:
    """All fields of that kind, None for what was not measured."""
    return {f"{name}_bytes_per_s": found.get(f"{name}_bytes_per_s") for name in names}
