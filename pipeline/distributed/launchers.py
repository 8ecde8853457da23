"""One map from the environments of launchers and schedulers to this process's place in a run."""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from pipeline.distributed.environment import TORCHRUN_VARIABLES
from pipeline.distributed.placement import (
    PORTS,
    RDZV_PORT,
    NodePlacement,
    Placement,
    RankPlacement,
    address,
    node_count,
)
from pipeline.errors import UsageError

Environ = Mapping[str, str]
MOST_HOSTS = 65_536


def placement(environ: Environ) -> Placement | None:
    """This process's place as its launcher says; None if it runs by itself.

    Raises UsageError where a launcher's variables are incomplete, or contradict each other or those
    of another launcher.
    """
    first, skipped = None, frozenset[str]()
    for name, read in LAUNCHERS.items():
        found = None if name in skipped else read(environ)
        if found is None:
            continue
        if isinstance(found, NodePlacement) and found.node_rank >= found.nodes:
            raise UsageError(f"{found.describe()}: node ranks count from 0")
        if first is None:
            if "TORCHELASTIC_RUN_ID" in environ:  # any of the others may have started torchrun
                return found
            first, skipped = found, MAY_START.get(name, skipped)
        elif _differ(first, found):
            raise UsageError(
                f"the environment is contradictory: {first.describe()}, but {found.describe()}",
                hint="unset the variables of the launcher that did not start this process",
            )
    return first


def require_no_launcher(command: str) -> None:
    """Raise UsageError where a launcher has started a command that starts its own processes."""
    found = placement(os.environ)
    if found is not None:
        raise UsageError(
            f"{command} starts its own processes, and this one is {found.describe()}",
            hint=f"run it without {found.source}",
        )


def require_task(environ: Environ) -> None:
    """Raise UsageError in the batch script of a Slurm job of several nodes, where `srun` was
    forgotten: a run would use the first of them only."""
    nodes = _optional(environ, "SLURM_NNODES") or 1
    if nodes > 1 and "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" not in environ:
        raise UsageError(
            f"this Slurm job has {nodes} nodes, but this is the batch script, not a task",
            hint="start it with `srun pipe run ...`, or unset SLURM_NNODES",
        )


def _differ(first: Placement, second: Placement) -> bool:
    if isinstance(first, RankPlacement) and isinstance(second, RankPlacement):
        return (first.rank, first.world_size) != (second.rank, second.world_size)
    if isinstance(first, NodePlacement) and isinstance(second, NodePlacement):
        return (first.node_rank, first.nodes) != (second.node_rank, second.nodes)
    ranks, nodes = (first, second) if isinstance(first, RankPlacement) else (second, first)
    assert isinstance(ranks, RankPlacement)
    assert isinstance(nodes, NodePlacement)
    # a launcher of nodes may have started one of ranks, if the numbers allow it
    return ranks.world_size % nodes.nodes != 0


RANGE = r"\d+(?:-\d+)?"
HOST = rf"(?:[^][,]|\[{RANGE}(?:,{RANGE})*\])+"
"""A part of Slurm's host list: characters, and lists of ranges in brackets."""


def expand_hosts(text: str) -> list[str]:
    """Hosts of a Slurm host list, as in `n[001-003,7]-ib,gpu-a`. Raises UsageError."""
    if not re.fullmatch(f"{HOST}(?:,{HOST})*", text):
        raise UsageError(f"the host list {text} is not one of Slurm's")
    hosts: list[str] = []
    for part in re.findall(HOST, text):
        names = [""]
        for word, ranges in re.findall(r"([^][]+)|\[(.*?)\]", part):
            edges = (one.partition("-") for one in ranges.split(",") if one)
            numbers = (
                f"{value:0{len(low)}}"
                for low, _, high in edges
                for value in range(int(low), int(high or low) + 1)
            )
            ends = _at_most(text, numbers) if ranges else [word]
            names = _at_most(text, (f"{name}{end}" for name in names for end in ends))
        hosts += names
        if len(hosts) > MOST_HOSTS:
            break
    return _at_most(text, hosts)


def _at_most(text: str, hosts: Iterable[str]) -> list[str]:
    found = list(itertools.islice(hosts, MOST_HOSTS + 1))
    if len(found) > MOST_HOSTS:
        raise UsageError(f"more than {MOST_HOSTS} hosts in the host list {text[:80]}")
    return found


def expand_counts(text: str) -> list[int]:
    """Tasks of each node of Slurm's `2(x3),1`. Raises UsageError."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not found or int(found[2] or 1) > MOST_HOSTS:
            raise UsageError(f"SLURM_STEP_TASKS_PER_NODE={text} does not read like 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _number(environ: Environ, name: str) -> int:
    value = environ[name].strip()
    if not value.isdecimal():
        raise UsageError(f"{name}={environ[name]}, which is not a whole number")
    return int(value)


def _optional(environ: Environ, name: str) -> int | None:
    return _number(environ, name) if environ.get(name) else None


def _port(environ: Environ, name: str, default: int | None = None) -> int:
    """A variable's port; `default` without one."""
    if default is not None and not environ.get(name):
        return default
    found = _number(environ, name)
    if not 0 < found < PORTS:
        raise UsageError(f"{name}={found}, but ports are numbers from 1 to {PORTS - 1}")
    return found


def _settings(environ: Environ, *names: str) -> str:
    return " and ".join(f"{name}={environ[name]}" for name in names if name in environ)


def _require(environ: Environ, given: list[str], needed: list[str]) -> None:
    """Raise UsageError where a launcher has set the variables `given`, but not all `needed`."""
    missing = [name for name in needed if name not in environ]
    if missing:
        are = "are" if len(given) > 1 else "is"
        raise UsageError(
            f"{_settings(environ, *given)} {are} set by a launcher of several processes, but not "
            f"{', '.join(missing)}: each process would start its own run",
            hint="start `torchrun -m pipetrain run RECIPE` once per node; "
            f"or unset {' and '.join(given)}",
        )


def _rank(
    environ: Environ, source: str, names: Sequence[str], where: tuple[str, int],
    local_world_size: int | None, job: str = "",
) -> RankPlacement:  # fmt: skip
    """A rank, of variables with its rank, the number of ranks, its local rank and the local number.
    Raises UsageError where these contradict each other."""
    rank, size, local_rank, local_size = names
    found = RankPlacement(
        source=source, rank=_number(environ, rank), world_size=_number(environ, size),
        local_rank=_number(environ, local_rank), local_world_size=local_world_size,
        host=where[0], port=where[1], job=job,
    )  # fmt: skip
    for own, count, variables in (
        (found.rank, found.world_size, (rank, size)),
        (found.local_rank, local_world_size, (local_rank, local_size)),
    ):
        if count is not None and own >= count:
            raise UsageError(f"{_settings(environ, *variables)}: ranks count from 0")
    if (local_world_size or 0) > found.world_size:
        said = _settings(environ, local_size, size)
        raise UsageError(f"{said}: this machine cannot have more than all")
    return found


def _torchrun(environ: Environ) -> RankPlacement | None:
    """RANK and what belongs to it, from torchrun or by hand."""
    if not all(name in environ for name in TORCHRUN_VARIABLES):
        # Some batch systems set only WORLD_SIZE=1 or MASTER_ADDR; or another launcher says the
        # rank, and these are left over.
        given = [name for name in TORCHRUN_VARIABLES[:3] if name in environ]
        others = {"SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"} & environ.keys()
        if given and environ.get("WORLD_SIZE") != "1" and not others:
            _require(environ, given, list(TORCHRUN_VARIABLES))
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    where = environ["MASTER_ADDR"], _port(environ, "MASTER_PORT")
    here = _optional(environ, "LOCAL_WORLD_SIZE")
    return _rank(environ, "torchrun's variables", names, where, here)


def _mpi(source: str, *names: str) -> Callable[[Environ], Placement | None]:
    """A reader of an MPI launcher's rank, size, local rank and local size."""
    rank, size, local_rank, local_size = names

    def read(environ: Environ) -> RankPlacement | None:
        if environ.get(size, "1") in ("", "1"):
            return None
        _require(environ, [size], [rank, local_rank])
        here, job = _optional(environ, local_size), environ.get("PMIX_NAMESPACE", "")
        host, port = environ.get("MASTER_ADDR"), RDZV_PORT
        if host is None and here == _number(environ, size):  # on this machine's loopback
            host = "127.0.0.1"
            port = 20_000 + zlib.crc32((job or str(os.getppid())).encode()) % 20_000
        if host is None:
            raise UsageError(
                f"{source} does not say where rank 0 is",
                hint="name rank 0's machine and a free port there: "
                "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500",
            )
        where = host, _port(environ, "MASTER_PORT", port)
        return _rank(environ, source, names, where, here, job)

    return read


def _slurm(environ: Environ) -> Placement | None:
    """A task of `srun`: one of several on its node is a rank, one by itself on each of several
    nodes starts its node's ranks. A batch script's own shell has no SLURM_STEP_NUM_TASKS
    (https://slurm.schedmd.com/srun.html, output environment variables)."""
    size, per_node, listed = (
        f"SLURM_STEP_{name}" for name in ("NUM_TASKS", "TASKS_PER_NODE", "NODELIST")
    )
    tasks = _optional(environ, size) or 1
    if tasks == 1:
        return None
    _require(environ, [size], ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", listed])
    hosts, node = expand_hosts(environ[listed]), _number(environ, "SLURM_NODEID")
    if node >= len(hosts):
        said = f"{listed}={environ[listed]} has {len(hosts)} hosts"
        raise UsageError(f"SLURM_NODEID={node}, but {said}")
    job, step = _optional(environ, "SLURM_JOB_ID") or 0, _optional(environ, "SLURM_STEP_ID") or 0
    name = f"slurm-{job}.{step}"
    host = environ.get("MASTER_ADDR", hosts[0])
    port = _port(environ, "MASTER_PORT", 20_000 + (job * 16 + step) % 20_000)
    if tasks == len(hosts):
        return NodePlacement(
            source="Slurm", node_rank=node, nodes=tasks, host=host, port=port, job=name
        )
    counts = expand_counts(environ.get(per_node, str(tasks)))
    if sum(counts) != tasks or len(counts) != len(hosts):
        said = f"{per_node}={environ.get(per_node)} contradicts {size}={tasks}"
        raise UsageError(f"{said} on {len(hosts)} hosts")
    names = ("SLURM_PROCID", size, "SLURM_LOCALID", per_node)
    return _rank(environ, "Slurm", names, (host, port), counts[node], name)


def _kubeflow(environ: Environ) -> NodePlacement | None:
    """torchrun's options as variables (PET_*), which Kubeflow's Trainer sets."""
    if "PET_NNODES" not in environ:
        return None
    nodes = node_count(environ["PET_NNODES"], "PET_NNODES")
    procs = environ.get("PET_NPROC_PER_NODE", "auto")
    here = int(procs) if procs.isdecimal() else None
    if here == 0 or (here is None and procs not in ("auto", "gpu", "cpu")):
        raise UsageError(f"PET_NPROC_PER_NODE={procs} is neither a number above 0 nor auto")
    host, port = "127.0.0.1", RDZV_PORT
    if nodes > 1:
        endpoint = environ.get("PET_RDZV_ENDPOINT")
        there = [] if endpoint else ["PET_MASTER_ADDR"]
        _require(environ, ["PET_NNODES"], [*there, "PET_NODE_RANK"])
        if endpoint:
            host, port = address(endpoint, "PET_RDZV_ENDPOINT")
        else:
            port = _port(environ, "PET_MASTER_PORT", RDZV_PORT)
            host = environ["PET_MASTER_ADDR"]
    return NodePlacement(
        source="Kubeflow's PET_* variables", node_rank=_optional(environ, "PET_NODE_RANK") or 0,
        nodes=nodes, host=host, port=port, procs=here,
    )  # fmt: skip


def _cloud(
    source: str, prefix: str, size: str, host: str, gpus: str
) -> Callable[[Environ], NodePlacement | None]:
    """A reader of a cloud tool's variables: of its nodes, the first one's address, and its GPUs."""
    size, rank, host, gpus = (f"{prefix}_{name}" for name in (size, "NODE_RANK", host, gpus))

    def read(environ: Environ) -> NodePlacement | None:
        nodes = _optional(environ, size) or 1
        if nodes == 1:
            return None
        _require(environ, [size], [rank, host])
        addresses = environ[host].split()
        if host.endswith("IPS") and len(addresses) != nodes:
            raise UsageError(f"{size}={nodes}, but {host} has {len(addresses)} addresses")
        return NodePlacement(
            source=source, node_rank=_number(environ, rank), nodes=nodes, host=addresses[0],
            port=_port(environ, "MASTER_PORT", RDZV_PORT),
            procs=_optional(environ, gpus) or None,
        )  # fmt: skip

    return read


_OMPI, _MV2 = (
    [f"{prefix}_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    for prefix in ("OMPI", "MV2")
)
LAUNCHERS: Mapping[str, Callable[[Environ], Placement | None]] = {
    "torchrun": _torchrun,
    "Open MPI": _mpi("Open MPI", *_OMPI),
    "MVAPICH": _mpi("MVAPICH", *_MV2),
    "Slurm": _slurm,
    "Hydra": _mpi("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Kubeflow": _kubeflow,
    "SkyPilot": _cloud("SkyPilot", "SKYPILOT", "NUM_NODES", "NODE_IPS", "NUM_GPUS_PER_NODE"),
    "dstack": _cloud("dstack", "DSTACK", "NODES_NUM", "MASTER_NODE_IP", "GPUS_PER_NODE"),
}
"""Readers of launchers' variables. The first that finds its own decides."""

MAY_START: Mapping[str, frozenset[str]] = {
    "Open MPI": frozenset({"Slurm", "Hydra"}),  # mpirun starts its daemons with srun
    "MVAPICH": frozenset({"Slurm", "Hydra"}),
    "Slurm": frozenset({"Hydra"}),  # srun speaks PMI itself
}
"""Launcher -> those whose variables add nothing to its own."""
