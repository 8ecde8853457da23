"""This process's place in a run, as launchers, options and hostfiles say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import click

from pipeline.distributed.hosts import own_rank, read_hostfile
from pipeline.errors import UsageError

Environ = Mapping[str, str]
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
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }
        if self.local_world_size is not None:
            found["LOCAL_WORLD_SIZE"] = str(self.local_world_size)
        return found

    def describe(self) -> str:
        """Its place, for messages."""
        return f"rank {self.rank} of {self.world_size} ({self.source})"


@dataclass(frozen=True, kw_only=True)
class NodePlacement:
    """This process starts the ranks of one node."""

    source: str
    """The launcher or the options that say so."""
    node_rank: int
    min_nodes: int
    max_nodes: int
    host: str
    """Node 0's machine."""
    port: int
    procs: int | None = None
    """Ranks of each node; None leaves it to the recipe."""
    job: str = ""
    """Identity of the launcher's job, where the port follows from it."""

    def describe(self) -> str:
        """Its place, for messages."""
        few, most = self.min_nodes, self.max_nodes
        nodes = str(most) if few == most else f"{few}:{most}"
        return f"node {self.node_rank} of {nodes} ({self.source})"


Placement = RankPlacement | NodePlacement


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Options of `pipe run` that say which of several nodes this is."""

    nodes: str | None = None
    """`N` or `MIN:MAX`."""
    node_rank: int | None = None
    rdzv: str | None = None
    """`HOST:PORT` of node 0; without a port, RDZV_PORT."""
    hostfile: Path | None = None

    def given(self) -> bool:
        """Whether any is."""
        return any(value is not None for value in vars(self).values())


def combined(options: NodeOptions, found: Placement | None) -> Placement | None:
    """The place that options and launcher give together: options add what the launcher leaves open.
    None if this process runs by itself. Raises UsageError where they contradict each other."""
    if not options.given():
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
            rank = own_rank(options.hostfile, [host.name for host in hosts])
        base = NodePlacement(
            source=str(options.hostfile),
            node_rank=rank,
            min_nodes=len(hosts),
            max_nodes=len(hosts),
            host=hosts[0].name,
            port=RDZV_PORT,
            procs=hosts[0].slots,
        )
        own = base.node_rank, base.max_nodes
        if found is not None and own != (found.node_rank, found.max_nodes):
            raise UsageError(f"{base.describe()} contradicts {found.describe()}")
    return _laid_over(options, base)


def _laid_over(options: NodeOptions, base: NodePlacement | None) -> NodePlacement:
    if options.nodes is not None:
        bounds(options.nodes, "--nodes")
    needed = () if base else ("nodes", "node_rank", "rdzv")
    missing = [name for name in needed if getattr(options, name) is None]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise UsageError(
            f"{flags} not given, and no launcher or hostfile sets it",
            hint="on every node: pipe run RECIPE --nodes N --node-rank NUMBER --rdzv HOST:PORT",
        )
    own: dict[str, object] = {}
    if options.nodes is not None:
        own["min_nodes"], own["max_nodes"] = bounds(options.nodes, "--nodes")
    if options.node_rank is not None:
        own["node_rank"] = options.node_rank
    if options.rdzv is not None:
        own["host"], own["port"] = address(options.rdzv, "--rdzv")
        if options.rdzv.removeprefix("[").removesuffix("]") == own["host"]:
            click.echo(f"--rdzv {options.rdzv} names no port: using {RDZV_PORT}", err=True)
    if base is None:
        made = NodePlacement(source="options", **own)  # type: ignore[arg-type]
    else:
        made = replace(base, **own)  # type: ignore[arg-type]
        if (made.node_rank, made.max_nodes) != (base.node_rank, base.max_nodes):
            said = replace(made, source="the options").describe()
            raise UsageError(f"{said} contradicts {base.describe()}")
    if made.node_rank >= made.max_nodes:
        ranks = {1: "0", 2: "0 or 1"}.get(made.max_nodes, f"from 0 to {made.max_nodes - 1}")
        raise UsageError(f"--node-rank must be {ranks}, as there are {made.max_nodes} nodes")
    return made


def bounds(text: str, where: str) -> tuple[int, int]:
    """Fewest and most nodes of `N` or `MIN:MAX`. Raises UsageError naming `where` it is from."""
    low, colon, high = text.strip().partition(":")
    parts = (low, high) if colon else (low, low)
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"{where}={text} is neither a number nor MIN:MAX, such as 2 or 2:4")
    if not all(map(int, parts)):
        raise UsageError(f"{where}={text}: must be at least 1")
    if int(parts[0]) > int(parts[1]):
        raise UsageError(f"{where}={text}: MIN is above MAX")
    return int(parts[0]), int(parts[1])


def address(text: str, where: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, `[IPV6]:PORT` or `HOST`. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(RDZV_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < PORTS:
        raise UsageError(f"{where}={text} is not HOST:PORT")
    return host, int(port)


def port_number(environ: Environ, name: str, default: int | None = None) -> int:
    """Value of a variable that holds a port. Without one, `default`, if there is that. Raises
    UsageError."""
    if default is not None and not environ.get(name):
        return default
    found = number(environ, name)
    if not 0 < found < PORTS:
        raise UsageError(f"{name}={found}, but ports are numbers from 1 to {PORTS - 1}")
    return found


def number(environ: Environ, name: str) -> int:
    """Value of a variable that holds a whole number. Raises UsageError."""
    value = environ[name].strip()
    if not value.isdecimal():
        raise UsageError(f"{name}={environ[name]}, which is not a whole number")
    return int(value)


def consistent(
    found: RankPlacement, environ: Environ, rank: str, size: str, local_rank: str, local_size: str
) -> RankPlacement:
    """The placement, if its numbers can be. Raises UsageError with the variables that differ."""
    here = found.local_world_size
    if found.rank >= found.world_size:
        raise UsageError(f"{settings(environ, [rank, size])}: ranks count from 0")
    if here is not None and found.local_rank >= here:
        raise UsageError(f"{settings(environ, [local_rank, local_size])}: ranks count from 0")
    if here is not None and here > found.world_size:
        raise UsageError(
            f"{settings(environ, [local_size, size])}: this machine cannot have more than all"
        )
    return found


def optional(environ: Environ, name: str) -> int | None:
    """A variable's whole number; None if it is not set. Raises UsageError."""
    return number(environ, name) if environ.get(name) else None


def incomplete(environ: Environ, found: list[str], missing: list[str]) -> UsageError:
    """The error for a launcher that has set some of its variables and not others."""
    return UsageError(
        f"{settings(environ, found)} {'are' if len(found) > 1 else 'is'} set by a launcher of "
        f"several processes, but not {', '.join(missing)}: each process would start its own run",
        hint="start `torchrun -m pipetrain run RECIPE` once per node; "
        f"or unset {' and '.join(found)}",
    )


def settings(environ: Environ, names: list[str]) -> str:
    """Variables with their values, for messages."""
    return " and ".join(f"{name}={environ[name]}" for name in names if name in environ)
