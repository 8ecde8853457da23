"""One map from the environments of launchers to this process's place in a run."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping

from pipeline.distributed.environment import CONTRACT, STORE
from pipeline.distributed.hosts import expand_counts, expand_hosts
from pipeline.distributed.placement import (
    RDZV_PORT,
    NodePlacement,
    Placement,
    RankPlacement,
    address,
    bounds,
    number,
)
from pipeline.errors import UsageError

Environ = Mapping[str, str]


def placement(environ: Environ) -> Placement | None:
    """This process's place as its launcher says; None if it runs by itself.

    Raises UsageError where a launcher's variables are incomplete, or contradict each other or those
    of another launcher.
    """
    if STORE in environ:  # a rank that `pipe` has started
        return None
    first, skipped = None, frozenset[str]()
    for name, read in LAUNCHERS.items():
        found = None if name in skipped else read(environ)
        if found is None:
            continue
        if first is None:
            if "TORCHELASTIC_RUN_ID" in environ:  # any of the others may have started torchrun
                return found
            first, skipped = found, MAY_START.get(name, skipped)
        elif _differ(first, found):
            raise UsageError(
                f"the environment contradicts itself: {first.describe()}, but {found.describe()}",
                hint="unset the variables of the launcher that did not start this process",
            )
    return first


def _differ(first: Placement, second: Placement) -> bool:
    if isinstance(first, RankPlacement) and isinstance(second, RankPlacement):
        return (first.rank, first.world_size) != (second.rank, second.world_size)
    if isinstance(first, NodePlacement) and isinstance(second, NodePlacement):
        return (first.node_rank, first.max_nodes) != (second.node_rank, second.max_nodes)
    ranks = first if isinstance(first, RankPlacement) else second
    nodes = second if isinstance(first, RankPlacement) else first
    assert isinstance(ranks, RankPlacement)
    assert isinstance(nodes, NodePlacement)
    # a launcher of nodes may have started one of ranks, if the numbers allow it
    return ranks.world_size % nodes.max_nodes != 0 and nodes.min_nodes == nodes.max_nodes


def _torchrun(environ: Environ) -> RankPlacement | None:
    """RANK and what belongs to it, from torchrun or by hand."""
    given = [name for name in CONTRACT if name in environ]
    missing = [name for name in CONTRACT if name not in environ]
    if missing:
        # some batch systems set WORLD_SIZE=1 or MASTER_ADDR alone
        several = [name for name in given[:3] if name in CONTRACT[:3]]
        if several and environ.get("WORLD_SIZE") != "1" and not _others(environ):
            raise _incomplete(environ, several, missing)
        return None
    found = RankPlacement(
        source="torchrun's variables",
        rank=number(environ, "RANK"),
        world_size=number(environ, "WORLD_SIZE"),
        local_rank=number(environ, "LOCAL_RANK"),
        local_world_size=_optional(environ, "LOCAL_WORLD_SIZE"),
        host=environ["MASTER_ADDR"],
        port=number(environ, "MASTER_PORT"),
    )
    return _consistent(found, environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _others(environ: Environ) -> bool:
    """Whether another launcher says the rank, and the ones of torchrun's are left over."""
    return any(name in environ for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))


def _mpi(source: str, names: tuple[str, str, str, str]) -> Callable[[Environ], Placement | None]:
    """A reader of an MPI launcher's rank, size, local rank and local size."""
    rank, size, local_rank, local_size = names

    def read(environ: Environ) -> RankPlacement | None:
        if environ.get(size, "1") in ("", "1"):
            return None
        missing = [name for name in (rank, local_rank) if name not in environ]
        if missing:
            raise _incomplete(environ, [size], missing)
        here = _optional(environ, local_size)
        host, port = _mpi_master(environ, number(environ, size), here, source)
        namespace = environ.get("PMIX_NAMESPACE", "")
        found = RankPlacement(
            source=source,
            rank=number(environ, rank),
            world_size=number(environ, size),
            local_rank=number(environ, local_rank),
            local_world_size=here,
            host=host,
            port=port,
            job=namespace,
        )
        return _consistent(found, environ, *names)

    return read


def _mpi_master(environ: Environ, size: int, here: int | None, source: str) -> tuple[str, int]:
    """Rank 0's address, which MPI does not tell: given, or the loopback if all ranks are here."""
    port = _optional(environ, "MASTER_PORT")
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"], port or RDZV_PORT
    if here != size:
        raise UsageError(
            f"{source} does not say where rank 0 is",
            hint="set MASTER_ADDR and MASTER_PORT to an address of rank 0's machine and a free "
            "port there (mpirun -x MASTER_ADDR=...)",
        )
    job = environ.get("PMIX_NAMESPACE") or str(os.getppid())
    return "127.0.0.1", port or 20_000 + zlib.crc32(job.encode()) % 20_000


def _slurm(environ: Environ) -> Placement | None:
    """A task of `srun`: one of several on its node is a rank, one alone on each of several nodes
    starts its node's ranks. A batch script's own shell has no SLURM_STEP_NUM_TASKS
    (https://slurm.schedmd.com/srun.html, output environment variables)."""
    tasks = _optional(environ, "SLURM_STEP_NUM_TASKS") or 1
    if tasks == 1:
        return None
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NODELIST")
    missing = [name for name in needed if name not in environ]
    if missing:
        raise _incomplete(environ, ["SLURM_STEP_NUM_TASKS"], missing)
    hosts, node = expand_hosts(environ["SLURM_STEP_NODELIST"]), number(environ, "SLURM_NODEID")
    if node >= len(hosts):
        raise UsageError(
            f"SLURM_NODEID={node}, but SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']} has "
            f"{len(hosts)} hosts"
        )
    job, step = _optional(environ, "SLURM_JOB_ID") or 0, _optional(environ, "SLURM_STEP_ID") or 0
    host = environ.get("MASTER_ADDR", hosts[0])
    port = _optional(environ, "MASTER_PORT") or 20_000 + (job * 16 + step) % 20_000
    if tasks == len(hosts):
        return NodePlacement(
            source="Slurm", node_rank=node, min_nodes=tasks, max_nodes=tasks, host=host, port=port,
            job=f"slurm-{job}.{step}",
        )  # fmt: skip
    counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", str(tasks)))
    if sum(counts) != tasks or len(counts) != len(hosts):
        raise UsageError(
            f"SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE')} contradicts "
            f"SLURM_STEP_NUM_TASKS={tasks} on {len(hosts)} hosts"
        )
    found = RankPlacement(
        source="Slurm",
        rank=number(environ, "SLURM_PROCID"),
        world_size=tasks,
        local_rank=number(environ, "SLURM_LOCALID"),
        local_world_size=counts[node],
        host=host,
        port=port,
        job=f"slurm-{job}.{step}",
    )
    return _consistent(
        found, environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
    )  # fmt: skip


def _kubeflow(environ: Environ) -> NodePlacement | None:
    """torchrun's options as variables (PET_*), which Kubeflow's Trainer sets."""
    if "PET_NNODES" not in environ:
        return None
    fewest, most = bounds(environ["PET_NNODES"], "PET_NNODES")
    procs = environ.get("PET_NPROC_PER_NODE", "auto")
    if procs not in ("auto", "gpu", "cpu") and not procs.isdecimal():
        raise UsageError(f"PET_NPROC_PER_NODE={procs} is neither a number nor auto")
    rank, host, port = _optional(environ, "PET_NODE_RANK"), "127.0.0.1", RDZV_PORT
    if most > 1:
        where = environ.get("PET_RDZV_ENDPOINT")
        if where:
            host, port = address(where, "PET_RDZV_ENDPOINT")
        elif "PET_MASTER_ADDR" in environ:
            host = environ["PET_MASTER_ADDR"]
            port = _optional(environ, "PET_MASTER_PORT") or RDZV_PORT
        missing = ["PET_MASTER_ADDR"] * (host == "127.0.0.1") + ["PET_NODE_RANK"] * (rank is None)
        if missing:
            raise _incomplete(environ, ["PET_NNODES"], missing)
    return _node(
        NodePlacement(
            source="Kubeflow's PET_* variables",
            node_rank=rank or 0,
            min_nodes=fewest,
            max_nodes=most,
            host=host,
            port=port,
            procs=int(procs) if procs.isdecimal() else None,
        )
    )


def _skypilot(environ: Environ) -> NodePlacement | None:
    nodes = _optional(environ, "SKYPILOT_NUM_NODES") or 1
    if nodes == 1:
        return None
    missing = [n for n in ("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS") if n not in environ]
    if missing:
        raise _incomplete(environ, ["SKYPILOT_NUM_NODES"], missing)
    addresses = environ["SKYPILOT_NODE_IPS"].split()
    if len(addresses) != nodes:
        raise UsageError(
            f"SKYPILOT_NUM_NODES={nodes}, but SKYPILOT_NODE_IPS has {len(addresses)} addresses"
        )
    return _cloud(environ, "SkyPilot", "SKYPILOT_NODE_RANK", nodes, addresses[0],
                  "SKYPILOT_NUM_GPUS_PER_NODE")  # fmt: skip


def _dstack(environ: Environ) -> NodePlacement | None:
    nodes = _optional(environ, "DSTACK_NODES_NUM") or 1
    if nodes == 1:
        return None
    missing = [n for n in ("DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP") if n not in environ]
    if missing:
        raise _incomplete(environ, ["DSTACK_NODES_NUM"], missing)
    return _cloud(environ, "dstack", "DSTACK_NODE_RANK", nodes, environ["DSTACK_MASTER_NODE_IP"],
                  "DSTACK_GPUS_PER_NODE")  # fmt: skip


def _cloud(
    environ: Environ, source: str, rank: str, nodes: int, host: str, gpus: str
) -> NodePlacement:
    return _node(
        NodePlacement(
            source=source,
            node_rank=number(environ, rank),
            min_nodes=nodes,
            max_nodes=nodes,
            host=host,
            port=_optional(environ, "MASTER_PORT") or RDZV_PORT,
            procs=_optional(environ, gpus) or None,
        )
    )


def _node(found: NodePlacement) -> NodePlacement:
    if found.node_rank >= found.max_nodes:
        raise UsageError(f"{found.describe()}: node ranks count from 0")
    return found


def _consistent(
    found: RankPlacement, environ: Environ, rank: str, size: str, local_rank: str, local_size: str
) -> RankPlacement:
    """The placement, if its numbers can be. Raises UsageError with the variables that differ."""
    here = found.local_world_size
    if found.rank >= found.world_size:
        raise UsageError(f"{_settings(environ, [rank, size])}: ranks count from 0")
    if here is not None and found.local_rank >= here:
        raise UsageError(f"{_settings(environ, [local_rank, local_size])}: ranks count from 0")
    if here is not None and here > found.world_size:
        raise UsageError(
            f"{_settings(environ, [local_size, size])}: this machine cannot have more than all"
        )
    return found


def _optional(environ: Environ, name: str) -> int | None:
    return number(environ, name) if environ.get(name) else None


def _incomplete(environ: Environ, found: list[str], missing: list[str]) -> UsageError:
    return UsageError(
        f"{_settings(environ, found)} is set by a launcher of several processes, but not "
        f"{', '.join(missing)}: each process would make a run of its own",
        hint="have it start torchrun, once a node, and that `-m pipetrain run`; "
        f"or unset {', '.join(found)} for a run by itself",
    )


def _settings(environ: Environ, names: list[str]) -> str:
    return " and ".join(f"{name}={environ[name]}" for name in names if name in environ)


LAUNCHERS: Mapping[str, Callable[[Environ], Placement | None]] = {
    "torchrun": _torchrun,
    "Open MPI": _mpi(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
         "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    "MVAPICH": _mpi(
        "MVAPICH",
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
         "MV2_COMM_WORLD_LOCAL_SIZE"),
    ),
    "Slurm": _slurm,
    "Hydra": _mpi("MPICH", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    "Kubeflow": _kubeflow,
    "SkyPilot": _skypilot,
    "dstack": _dstack,
}  # fmt: skip
"""Readers of launchers' variables. The first that finds its own decides."""

MAY_START: Mapping[str, frozenset[str]] = {
    "Open MPI": frozenset({"Slurm", "Hydra"}),  # mpirun starts its daemons with srun
    "MVAPICH": frozenset({"Slurm", "Hydra"}),
    "Slurm": frozenset({"Hydra"}),  # srun speaks PMI itself
}
"""Launcher -> those whose variables say nothing of their own beside its."""
