"""Variables that switch fast ways off, or lead nowhere."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from pipeline.distributed.environment import LOOPBACK
from pipeline.doctor.report import MachineReport
from pipeline.doctor.rules.finding import Finding

OFF = ("", "0")
SLOW = {
    "NCCL_P2P_DISABLE": "GPUs no longer reach each other directly (NVLink, PCIe)",
    "NCCL_SHM_DISABLE": "processes of a machine exchange over the network",
    "NCCL_IB_DISABLE": "machines exchange over TCP instead of InfiniBand or RoCE",
    "CUDA_LAUNCH_BLOCKING": "the program waits for every kernel",
}


def slow_switches(machine: MachineReport) -> Iterator[Finding]:
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


def no_such_interface(machine: MachineReport) -> Iterator[Finding]:
    """NCCL uses what remains of a choice, gloo all that it names."""
    if not machine.network.interfaces:
        return
    up = [*(interface.name for interface in machine.network.interfaces), LOOPBACK]
    nccl = machine.environment.get("NCCL_SOCKET_IFNAME", "")
    if not _nccl_uses(nccl, up):
        yield _no_interface("NCCL_SOCKET_IFNAME", nccl, "that leaves none of the interfaces", up)
    gloo = machine.environment.get("GLOO_SOCKET_IFNAME", "")
    missing = [name for name in gloo.split(",") if name and name not in up]
    if missing:
        reason = f"{missing[0]} is none of the interfaces"
        yield _no_interface("GLOO_SOCKET_IFNAME", gloo, reason, up)


def _nccl_uses(choice: str, interfaces: Sequence[str]) -> list[str]:
    """Those whose names begin like one in the list, or behind `=` are in it; behind `^` all others.

    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    exactly = choice.removeprefix("^").startswith("=")
    names = tuple(filter(None, choice.removeprefix("^").removeprefix("=").split(",")))
    if not names:
        return list(interfaces)
    named = [one for one in interfaces if (one in names if exactly else one.startswith(names))]
    return [one for one in interfaces if one not in named] if choice.startswith("^") else named


def _no_interface(variable: str, choice: str, reason: str, up: Sequence[str]) -> Finding:
    return Finding(
        severity="error",
        name="interface",
        seen=f"{variable}={choice}, but {reason} that are up: {', '.join(up)}",
        why="processes cannot find each other",
        do=f"unset {variable}, or name one of those",
    )


def public_address(machine: MachineReport) -> Iterator[Finding]:
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
