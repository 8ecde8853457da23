"""The report for people: sections of aligned lines, findings last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import click

from pipeline.doctor.report import Collective, Limit, MachineReport
from pipeline.doctor.rules.finding import SEVERITIES, Finding
from pipeline.utils.text import human

Row = tuple[str, str]
UNKNOWN = "-"
WIDTH = 100
OPERATORS = "compiler", "ninja", "cuda_home"


def lines(machine: MachineReport, found: Sequence[Finding]) -> Iterator[str]:
    """All of the report, line by line; `found` in the order in which it is told."""
    sections = (
        ("machine", _machine(machine)),
        ("GPUs", _gpus(machine)),
        ("network", _network(machine)),
        ("software", _software(machine)),
        ("limits", _limits(machine)),
        ("environment", machine.environment.items()),
        ("folders", _folders(machine)),
        (f"measured, {_processes(machine)}", _rates(machine)),
    )
    for title, rows in sections:
        yield from _section(title, list(rows))
    yield from _collectives(machine)
    yield "what will hurt"
    yield from chain.from_iterable(map(_finding, found))
    yield f"  {_summary(found) or 'nothing'}"


def _section(title: str, rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield title
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        yield f"  {name:<{width}}  {value}"
    yield ""


def _machine(machine: MachineReport) -> Iterator[Row]:
    host = machine.host
    yield "system", host.system or UNKNOWN
    yield "processor", host.processor or UNKNOWN
    cores = UNKNOWN if host.cores is None else f"{host.cores:g}"
    yield "cores", f"{cores} of {host.cores_present or UNKNOWN} usable"
    if host.numa_nodes:
        yield "memory nodes", str(host.numa_nodes)
    yield "memory", f"{_bytes(machine.host_memory_bytes)}, {_bytes(host.memory_free_bytes)} free"
    yield "swap", f"{_bytes(host.swap_bytes)}, {_bytes(host.swap_used_bytes)} in use"


def _gpus(machine: MachineReport) -> Iterator[Row]:
    if not machine.devices and machine.software.gpus:
        yield "of the driver", f"{machine.software.gpus}, none of torch"
    elif not machine.devices:
        yield "none", "training runs on the processor"
    for name, device in machine.gpus.items():
        free = f", {human(device.memory_free_bytes)} free" if device.memory_free_bytes else ""
        capability = device.compute_capability or UNKNOWN
        memory = human(device.memory_bytes)
        yield name, f"{device.name}, {memory}{free}, compute capability {capability}"
    for link in machine.topology.links:
        yield f"{link.a}-{link.b}", link.kind
    for gpu, node in machine.topology.numa.items():
        yield gpu, f"memory node {node}"


def _network(machine: MachineReport) -> Iterator[Row]:
    for interface in machine.network.interfaces:
        speed = interface.bits_per_s
        yield interface.name, UNKNOWN if speed is None else f"{speed / 1e9:g} Gbit/s"
    if machine.network.rdma:
        yield "RDMA", ", ".join(machine.network.rdma)


def _software(machine: MachineReport) -> Iterator[Row]:
    software = machine.software
    yield "python", software.python or UNKNOWN
    yield from software.packages.items()
    versions = {"CUDA": software.torch_cuda, "NCCL": software.nccl, "driver": software.driver}
    yield from ((name, version) for name, version in versions.items() if version)
    if machine.operators.known:
        for name in OPERATORS:
            yield name.replace("_", " "), getattr(machine.operators, name) or "none"
        yield "libaio", "yes" if machine.operators.libaio else "none"


def _limits(machine: MachineReport) -> Iterator[Row]:
    kernel = machine.kernel
    for name, limit in kernel.limits.items():
        size = name in ("locked_memory", "core")
        yield name.replace("_", " "), _limit(limit, size=size)
    if kernel.processes_in_group is not None:
        yield "processes of the group", str(kernel.processes_in_group)
    if kernel.shared_memory_bytes is not None:
        free = _bytes(kernel.shared_memory_free_bytes)
        yield "shared memory", f"{human(kernel.shared_memory_bytes)}, {free} free"
    yield "transparent huge pages", kernel.transparent_huge_pages or UNKNOWN
    overcommit = kernel.overcommit_memory
    yield "overcommit", UNKNOWN if overcommit is None else str(overcommit)


def _limit(limit: Limit, *, size: bool) -> str:
    if limit.soft is None:
        return "unlimited"
    return human(limit.soft) if size else str(limit.soft)


def _folders(machine: MachineReport) -> Iterator[Row]:
    for folder in machine.folders:
        kind = folder.filesystem or UNKNOWN
        yield folder.use, f"{folder.path} ({kind}, {_bytes(folder.free_bytes)} free)"


def _processes(machine: MachineReport) -> str:
    each = "GPU" if machine.device == "cuda" else "process"
    return "1 process" if machine.procs == 1 else f"{machine.procs} processes, per {each}"


def _rates(machine: MachineReport) -> Iterator[Row]:
    for dtype, flops in machine.matmul_flops:
        if flops is not None or dtype != "fp16":
            told = UNKNOWN if flops is None else f"{flops / 1e12:.3f} TFLOP/s"
            yield f"matrix products, {dtype}", f"{told:>15}"
    yield "copy in host memory", _rate(machine.host_copy_bytes_per_s)
    if machine.device == "cuda":
        yield "host to GPU, page-locked", _rate(machine.h2d_bytes_per_s)
        yield "host to GPU, pageable", _rate(machine.h2d_pageable_bytes_per_s)
        yield "GPU to host, page-locked", _rate(machine.d2h_bytes_per_s)
        yield "GPU to host, pageable", _rate(machine.d2h_pageable_bytes_per_s)
    else:
        yield "between host and GPU", f"{'no GPU':>15}"
    yield "disk, written, synced", _rate(machine.disk_write_bytes_per_s)
    yield "disk, read, cache dropped", _rate(machine.disk_read_bytes_per_s)


def _collectives(machine: MachineReport) -> Iterator[str]:
    backend = "NCCL" if machine.device == "cuda" else "gloo"
    for name, rows in (("all-reduce", machine.allreduce), ("all-gather", machine.allgather)):
        if not rows:
            continue
        yield f"{name}, {machine.procs} processes ({backend})"
        yield f"  {'size':>10} {'time':>12} {'algorithm':>15} {'bus bandwidth':>15}"
        yield from map(_collective, rows)
        yield f"  latency: {rows[0].seconds * 1e6:.0f} us, at {_binary(rows[0].bytes)}"
        yield ""
    if machine.procs == 1:
        yield "one process: no all-reduce, no all-gather (--procs 2)"
        yield ""


def _collective(row: Collective) -> str:
    time = f"{row.seconds * 1e3:>9.3f} ms"
    return f"  {_binary(row.bytes):>10} {time} {_rate(row.algbw)} {_rate(row.busbw)}"


def _finding(finding: Finding) -> Iterator[str]:
    yield _wrapped(f"{finding.severity}: {finding.name}: {finding.seen}", 2)
    yield _wrapped(f"why: {finding.why}", 4)
    yield _wrapped(f"do:  {finding.do}", 4)
    yield ""


def _wrapped(text: str, indent: int) -> str:
    first, rest = " " * indent, " " * (indent + 5)
    return click.wrap_text(text, width=WIDTH, initial_indent=first, subsequent_indent=rest)


def _summary(found: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in found)
    return ", ".join(counted(counts[name], name) for name in SEVERITIES if counts[name])


def counted(count: int, name: str) -> str:
    """`1 error`, `2 errors`."""
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def _bytes(size: int | None) -> str:
    return UNKNOWN if size is None else human(size)


def _rate(rate: float | None) -> str:
    told = UNKNOWN if rate is None else f"{human(rate)}/s"
    return f"{told:>15}"


def _binary(size: int) -> str:
    return f"{size / 2**20:.4g} MiB" if size >= 2**20 else f"{size / 2**10:.4g} KiB"
