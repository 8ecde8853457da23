"""This process's place in a run: what launchers say, with options and hostfiles laid over it."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import psutil

from pipeline.distributed.settings import FIXED
from pipeline.errors import UsageError, system_errors_as
from pipeline.utils.foreign import read_whole

PORTS = 1 << 16
RDZV_PORT = 29400
"""Port of node 0, where nodes meet unless another is given; torchrun's default."""


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """This process is one rank; another launcher has started the others."""

    source: str
    """Its launcher."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    """Ranks on this machine; None if the launcher does not say."""
    host: str
    """Rank 0's machine."""
    port: int
    job: str = ""
    """Identity of the launcher's job, where the port follows from it."""

    def environment(self) -> dict[str, str]:
        """The variables in which torchrun says the same."""
        found = {
            "RANK": self.rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": self.local_rank,
            "MASTER_ADDR": self.host, "MASTER_PORT": self.port,
            "LOCAL_WORLD_SIZE": self.local_world_size,
        }  # fmt: skip
        return {name: str(value) for name, value in found.items() if value is not None}

    def describe(self) -> str:
        """Its place, for messages."""
        return f"rank {self.rank} of {self.world_size} ({self.source})"


@dataclass(frozen=True, kw_only=True)
class NodePlacement:
    """This process starts the ranks of one node."""

    source: str
    """The launcher or the options that say so."""
    node_rank: int
    nodes: int
    host: str
    """Node 0's machine."""
    port: int
    procs: int | None = None
    """Ranks of each node; None leaves it to the recipe."""
    job: str = ""
    """Identity of the launcher's job, where the port follows from it."""
    by_hand: bool = False
    """Whether options or a hostfile say so, and no launcher."""

    def describe(self) -> str:
        """Its place, for messages."""
        return f"node {self.node_rank} of {self.nodes} ({self.source})"


Placement = RankPlacement | NodePlacement


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Options of `pipe run` that say which of several nodes this is."""

    nodes: str | None = None
    node_rank: int | None = None
    rdzv: str | None = None
    """`HOST:PORT` of node 0; without a port, RDZV_PORT."""
    hostfile: Path | None = None


def combined(options: NodeOptions, found: Placement | None) -> Placement | None:
    """The place that options and launcher give together: options add what the launcher leaves open.
    None if this process runs by itself. Raises UsageError where they contradict each other."""
    if all(value is None for value in vars(options).values()):
        return found
    if isinstance(found, RankPlacement):
        raise UsageError(
            f"this process is {found.describe()}, so --nodes, --node-rank, --rdzv and --hostfile "
            "have no effect",
            hint="leave them out, or start one process per node",
        )
    base = found
    if options.hostfile is not None:
        hosts, rank = read_hostfile(options.hostfile), options.node_rank
        if rank is None:
            rank = own_rank(options.hostfile, list(hosts))
        host, slots = next(iter(hosts.items()))
        base = NodePlacement(
            source=str(options.hostfile), node_rank=rank, nodes=len(hosts), host=host,
            port=RDZV_PORT, procs=slots, by_hand=found is None,
        )  # fmt: skip
        _require_same(base, found)
    own: dict[str, Any] = {}
    if options.nodes is not None:
        own["nodes"] = node_count(options.nodes, "--nodes")
    needed = () if base else ("nodes", "node_rank", "rdzv")
    missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(options, name) is None]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} not given, and no launcher or hostfile sets it",
            hint="on every node: pipe run RECIPE --nodes N --node-rank NUMBER --rdzv HOST:PORT",
        )
    if options.node_rank is not None:
        own["node_rank"] = options.node_rank
    if options.rdzv is not None:
        own["host"], own["port"] = address(options.rdzv, "--rdzv")
        if options.rdzv.strip("[]") == own["host"]:
            click.echo(f"--rdzv {options.rdzv} names no port: using {RDZV_PORT}", err=True)
    made = replace(base, **own) if base else NodePlacement(source="options", by_hand=True, **own)
    _require_same(replace(made, source="the options"), base)
    if made.node_rank >= made.nodes:
        ranks = {1: "0", 2: "0 or 1"}.get(made.nodes, f"from 0 to {made.nodes - 1}")
        raise UsageError(f"--node-rank must be {ranks}, as there are {made.nodes} nodes")
    return made


def _require_same(found: NodePlacement, other: NodePlacement | None) -> None:
    if other and (found.node_rank, found.nodes) != (other.node_rank, other.nodes):
        raise UsageError(f"{found.describe()} contradicts {other.describe()}")


def node_count(text: str, where: str) -> int:
    """A number of nodes. Raises UsageError naming `where` it is from."""
    found = text.strip()
    if re.fullmatch(r"\d+:\d+", found):
        raise UsageError(f"{where}={text}: {FIXED}")
    if not found.isdecimal() or not int(found):
        raise UsageError(f"{where}={text} is not a number of nodes, such as 2")
    return int(found)


def address(text: str, where: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, `[IPV6]:PORT` or `HOST`. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(RDZV_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < PORTS:
        raise UsageError(f"{where}={text} is not HOST:PORT")
    return host, int(port)


def read_hostfile(file: Path) -> dict[str, int]:
    """Host -> slots of DeepSpeed's hostfile: lines of `HOST slots=N`, comments after #. All have
    the same number of slots. Raises UsageError with file and line."""
    with system_errors_as(UsageError):
        text = read_whole(file).decode("utf-8", errors="replace")
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content, place = line.partition("#")[0].strip(), f"{file}:{number}"
        if not content:
            continue
        found = re.fullmatch(r"(\S+)\s+slots\s*=\s*(\d+)\s*", content)
        if not found or int(found[2]) == 0:
            raise UsageError(f"{place}: `{content}` does not read like: worker-1 slots=8")
        host, slots = found[1], int(found[2])
        if host in hosts:
            raise UsageError(f"{place}: {host} occurs twice")
        hosts[host] = slots
        first, expected = next(iter(hosts.items()))
        if slots != expected:
            raise UsageError(
                f"{place}: {host} has {slots} slots, but {first} has {expected}: all nodes need "
                "the same number"
            )
    if not hosts:
        raise UsageError(f"{file}: no host in the file", hint="a line reads: worker-1 slots=8")
    return hosts


def own_rank(file: Path, hosts: Sequence[str]) -> int:
    """Place of this machine among the hosts. Raises UsageError if it is none or several of them."""
    names = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    addresses = {a.address for found in psutil.net_if_addrs().values() for a in found}
    mine = [rank for rank, host in enumerate(hosts) if host in names | addresses]
    mine = mine or [rank for rank, host in enumerate(hosts) if addresses_of(host) & addresses]
    if len(mine) != 1:
        which = "none" if not mine else "several"
        found = ", ".join(hosts[rank] for rank in mine) or ", ".join(hosts)
        raise UsageError(
            f"this machine, {socket.gethostname()}, is {which} of the hosts in {file}: {found}",
            hint="say which with --node-rank",
        )
    return mine[0]


def addresses_of(host: str) -> set[str]:
    """The addresses of a host; empty for one that is not known."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return set()


def interfaces(address: str) -> dict[str, str]:
    """Variables that bind gloo and NCCL to the interface with this address, unless they are set."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in {entry.address for entry in addresses}:
            variables = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
            return {key: os.environ.get(key, value) for key, value in variables.items()}
    return {}
