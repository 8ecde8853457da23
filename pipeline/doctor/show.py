"""Print the report for people: sections of aligned rows, findings last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import click

from pipeline.doctor.report import SEVERITIES, Finding, MachineReport, Record
from pipeline.utils.text import align, human, plural

Row = tuple[str, str]
UNKNOWN = "-"
WIDTH = 100
RATES = {
    "host_copy": "copy in host memory",
    "h2d": "host to GPU, page-locked",
    "d2h": "GPU to host, page-locked",
    "disk_write": "disk, written, synced",
    "disk_read": "disk, read, cache dropped",
}


def lines(machine: MachineReport, findings: Sequence[Finding]) -> Iterator[str]:
    """The report line by line; `findings` in the given order."""
    each = ", per GPU" if machine.device == "cuda" else ", per process"
    processes = plural(machine.procs, "process") + (each if machine.procs > 1 else "")
    tools, environment = machine.operators, machine.environment.items()
    memory = [("memory", _size(machine.host_memory_bytes))]
    yield from _section("machine", memory, _facts(machine.host))
    yield from _section("GPUs", _gpus(machine))
    yield from _section("network", _network(machine))
    yield from _section("software", _facts(machine.software), machine.software.packages.items())
    yield from _section("operators", _facts(tools) if tools else ())
    yield from _section("limits", _limits(machine), _facts(machine.kernel))
    yield from _section("environment", environment)
    yield from _section(
        "folders",
        (
            (one.use, f"{one.path} ({one.filesystem or UNKNOWN}, {_size(one.free_bytes)} free)")
            for one in machine.folders
        ),
    )
    yield from _section(f"measured, {processes}", _rates(machine))
    yield from _collectives(machine)
    yield "what will hurt"
    for finding in findings:
        texts = f"{finding.severity}: {finding.name}: {finding.seen}", f"why: {finding.why}"
        for text, indent in zip((*texts, f"do:  {finding.do}"), (2, 4, 4), strict=True):
            first, rest = " " * indent, " " * (indent + 5)
            yield click.wrap_text(text, WIDTH, initial_indent=first, subsequent_indent=rest)
        yield ""
    counts = Counter(finding.severity for finding in findings)
    counted = (plural(counts[name], name) for name in SEVERITIES if counts[name])
    yield f"  {', '.join(counted) or 'nothing'}"


def _section(title: str, *parts: Iterable[Row]) -> Iterator[str]:
    rows = [row for part in parts for row in part]
    if rows:
        yield from (title, *(f"  {line}" for line in align(rows, left=2)), "")


def _facts(record: Record) -> Iterator[Row]:
    """The known numbers and texts of a record by name; names in `_bytes` are sizes."""
    for name, value in record:
        label = name.removesuffix("_bytes").replace("_", " ")
        if isinstance(value, bool):
            yield label, "yes" if value else "no"
        elif isinstance(value, int | float):
            yield label, human(value) if name.endswith("_bytes") else f"{value:g}"
        elif isinstance(value, str):
            yield label, value


def _gpus(machine: MachineReport) -> Iterator[Row]:
    if not machine.devices and machine.software.gpus:
        yield "driver", f"{plural(machine.software.gpus, 'GPU')}, none usable by torch"
    elif not machine.devices:
        yield "none", "training runs on the processor"
    for name, device in machine.gpus.items():
        free = f", {human(device.memory_free_bytes)} free" if device.memory_free_bytes else ""
        capability = f"compute capability {device.compute_capability or UNKNOWN}"
        yield name, f"{device.name}, {human(device.memory_bytes)}{free}, {capability}"
    yield from ((f"{link.a}-{link.b}", link.kind) for link in machine.topology.links)
    yield from ((gpu, f"NUMA node {node}") for gpu, node in machine.topology.numa.items())


def _network(machine: MachineReport) -> Iterator[Row]:
    for interface in machine.network.interfaces:
        speed = interface.bits_per_s
        yield interface.name, UNKNOWN if speed is None else f"{speed / 1e9:g} Gbit/s"
    if machine.network.rdma:
        yield "RDMA", ", ".join(machine.network.rdma)


def _limits(machine: MachineReport) -> Iterator[Row]:
    for name, limit in machine.kernel.limits.items():
        text = human if name == "locked_memory" else str
        yield name.replace("_", " "), "unlimited" if limit.soft is None else text(limit.soft)


def _rates(machine: MachineReport) -> Iterator[Row]:
    for dtype, flops in machine.matmul_flops:
        if flops is not None or dtype != "fp16":
            rate = UNKNOWN if flops is None else f"{flops / 1e12:.3f} TFLOP/s"
            yield f"matrix products, {dtype}", rate
    for name, label in RATES.items():
        if machine.device == "cuda" or "2" not in name:
            yield label, _size(getattr(machine, f"{name}_bytes_per_s"), "/s")


def _collectives(machine: MachineReport) -> Iterator[str]:
    backend = "NCCL" if machine.device == "cuda" else "gloo"
    for name, rows in (("all-reduce", machine.allreduce), ("all-gather", machine.allgather)):
        if rows:
            table = [("size", "time", "algorithm bandwidth", "bus bandwidth")]
            for row in rows:
                rates = _size(row.algbw, "/s"), _size(row.busbw, "/s")
                table.append((_binary(row.bytes), f"{row.seconds * 1e3:.3f} ms", *rates))
            yield f"{name}, {plural(machine.procs, 'process')} ({backend})"
            yield from (f"  {line}" for line in align(table, left=0))
            yield f"  latency: {rows[0].seconds * 1e6:.0f} us, at {_binary(rows[0].bytes)}"
            yield ""
    if machine.procs == 1:
        yield from ("one process: no all-reduce, no all-gather (--procs 2)", "")


def _size(size: float | None, per: str = "") -> str:
    return UNKNOWN if size is None else f"{human(size)}{per}"


def _binary(size: int) -> str:
    return f"{size / 2**20:.4g} MiB" if size >= 2**20 else f"{size / 2**10:.4g} KiB"
