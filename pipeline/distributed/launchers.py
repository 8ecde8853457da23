"""One map from the environments of launchers to this process's place in a run."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping

from pipeline.distributed.environment import TORCHRUN_VARIABLES
from pipeline.distributed.placement import (
    RDZV_PORT,
    Environ,
    NodePlacement,
    Placement,
    RankPlacement,
    consistent,
    incomplete,
    number,
    optional,
    port_number,
)
from pipeline.distributed.schedulers import dstack, kubeflow, skypilot, slurm
from pipeline.errors import UsageError


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
    """Raise UsageError where a launcher has started this process of a command that starts its
    own."""
    found = placement(os.environ)
    if found is not None:
        raise UsageError(
            f"{command} starts its own processes, and this one is {found.describe()}",
            hint=f"run it without {found.source}",
        )


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
    given = [name for name in TORCHRUN_VARIABLES if name in environ]
    missing = [name for name in TORCHRUN_VARIABLES if name not in environ]
    if missing:
        # Some batch systems set only WORLD_SIZE=1 or MASTER_ADDR; or another launcher says the
        # rank, and these are left over.
        several = [name for name in given[:3] if name in TORCHRUN_VARIABLES[:3]]
        others = {"SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"} & environ.keys()
        if several and environ.get("WORLD_SIZE") != "1" and not others:
            raise incomplete(environ, several, missing)
        return None
    found = RankPlacement(
        source="torchrun's variables",
        rank=number(environ, "RANK"),
        world_size=number(environ, "WORLD_SIZE"),
        local_rank=number(environ, "LOCAL_RANK"),
        local_world_size=optional(environ, "LOCAL_WORLD_SIZE"),
        host=environ["MASTER_ADDR"],
        port=port_number(environ, "MASTER_PORT"),
    )
    return consistent(found, environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _mpi(source: str, names: tuple[str, str, str, str]) -> Callable[[Environ], Placement | None]:
    """A reader of an MPI launcher's rank, size, local rank and local size."""
    rank, size, local_rank, local_size = names

    def read(environ: Environ) -> RankPlacement | None:
        if environ.get(size, "1") in ("", "1"):
            return None
        missing = [name for name in (rank, local_rank) if name not in environ]
        if missing:
            raise incomplete(environ, [size], missing)
        here = optional(environ, local_size)
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
        return consistent(found, environ, *names)

    return read


def _mpi_master(environ: Environ, size: int, here: int | None, source: str) -> tuple[str, int]:
    """Rank 0's address, which MPI does not tell: given, or the loopback if all ranks are here."""
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"], port_number(environ, "MASTER_PORT", RDZV_PORT)
    if here != size:
        raise UsageError(
            f"{source} does not say where rank 0 is",
            hint="name rank 0's machine and a free port there: "
            "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500",
        )
    job = environ.get("PMIX_NAMESPACE") or str(os.getppid())
    own = 20_000 + zlib.crc32(job.encode()) % 20_000
    return "127.0.0.1", port_number(environ, "MASTER_PORT", own)


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
    "Slurm": slurm,
    "Hydra": _mpi("MPICH", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    "Kubeflow": kubeflow,
    "SkyPilot": skypilot,
    "dstack": dstack,
}  # fmt: skip
"""Readers of launchers' variables. The first that finds its own decides."""

MAY_START: Mapping[str, frozenset[str]] = {
    "Open MPI": frozenset({"Slurm", "Hydra"}),  # mpirun starts its daemons with srun
    "MVAPICH": frozenset({"Slurm", "Hydra"}),
    "Slurm": frozenset({"Hydra"}),  # srun speaks PMI itself
}
"""Launcher -> those whose variables say nothing of their own beside its."""
