"""Variables that switch fast ways off, or lead nowhere."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from pipeline.doctor.report import Machine
from pipeline.doctor.rules.finding import Finding

OFF = ("", "0")
SLOW = {
    "NCCL_P2P_DISABLE": "GPUs no longer reach each other directly (NVLink, PCIe)",
    "NCCL_SHM_DISABLE": "processes of a machine exchange over the network",
    "NCCL_IB_DISABLE": "machines exchange over TCP instead of InfiniBand or RoCE",
    "CUDA_LAUNCH_BLOCKING": "the program waits for every kernel",
}
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def slow_switches(machine: Machine) -> Iterator[Finding]:
    """Set while a fault was looked for, and forgotten."""
    effects = dict(SLOW)
    if not machine.network.rdma:
        del effects["NCCL_IB_DISABLE"]
    found = {
        name: effect
        for name, effect in effects.items()
        if machine.environment.get(name, "") not in OFF
    }
    if machine.environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        found["TORCH_DISTRIBUTED_DEBUG"] = "every collective operation is checked among all ranks"
    for name, effect in found.items():
        yield Finding(
            severity="warning",
            name="slow-switch",
            seen=f"{name}={machine.environment[name]}",
            why=effect,
            do=f"unset {name}",
        )


def no_such_interface(machine: Machine) -> Iterator[Finding]:
    """Names, or beginnings of names for NCCL; `=` before one means exactly it, `^` all others."""
    known = [interface.name for interface in machine.network.interfaces]
    for variable in INTERFACES:
        text = machine.environment.get(variable, "")
        wanted = [name.lstrip("=") for name in text.split(",") if name]
        if not known or not wanted or text.startswith("^") or "lo" in wanted:
            continue
        if not any(name.startswith(each) for name in known for each in wanted):
            yield Finding(
                severity="error",
                name="interface",
                seen=f"{variable}={text}, but the interfaces that are up are {', '.join(known)}",
                why="processes cannot find each other",
                do=f"unset {variable}, or name one of those",
            )


def public_address(machine: Machine) -> Iterator[Finding]:
    """What processes meet at asks nobody who he is."""
    text = machine.environment.get("MASTER_ADDR", "")
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return
    if address.is_global:
        yield Finding(
            severity="warning",
            name="public-address",
            seen=f"MASTER_ADDR={text} is an address of the internet",
            why="processes meet there without authentication: who reaches it can join",
            do="use an address of the machines' own network",
        )


RULES = (slow_switches, no_such_interface, public_address)
