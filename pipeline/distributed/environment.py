"""This process's place among others, as its launcher says: variables of torchrun, or of `pipe`."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from pipeline.distributed.settings import ProcessCounts

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TOKEN = "PIPE_RDZV_TOKEN"
"""Environment variable: a secret that nodes share, unless all are on this machine."""
ROUND = "PIPE_ROUND"
"""Environment variable of ranks of several nodes that `pipe` has started: in the nodes' store, what
the keys of this round of ranks begin with."""
FINISHED = 76
"""Exit code of a rank whose stages have all run. A library that calls exit(0) inside a rank ends it
too, so 0 does not prove that."""
STOPPED = 75
"""Exit code of a rank that was asked to stop and has saved (EX_TEMPFAIL in sysexits.h)."""
DUMP = signal.SIGRTMIN
"""Signal at which a rank writes its threads' stacks, whatever it is doing."""
LOOPBACK = "lo"
"""Loopback interface, which is up on every machine and enough within one."""
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": f"={LOOPBACK}"}
"""Variables with which gloo and NCCL listen on the loopback only, whatever the launcher said."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Descriptors of files in memory that a rank shares with the `pipe` that has started it, that
    no one else can open, and that end with the two."""

    heartbeats: int
    number: int
    """Place of this rank's heartbeat among them."""
    failures: int
    """Reports of failures that the run's disk does not take."""
    stacks: int
    """Stacks of this rank's threads."""
    store: int | None
    """Where the ranks of one machine meet; None if other nodes take part."""


shared: Shared | None = None
"""Set by a rank that `pipe` has started when it begins; None in any other process."""


def is_worker() -> bool:
    """Whether this process is a rank, of `pipe` or of a launcher with torchrun's variables."""
    return shared is not None or all(name in os.environ for name in TORCHRUN_VARIABLES)


def rank_environment(rank: int, procs: int) -> dict[str, str]:
    """Variables of a process that is `rank` among `procs`, all on this machine."""
    own, size = str(rank), str(procs)
    found = {"RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return found | ON_LOOPBACK


def worker_rank() -> int:
    """This process's rank; 0 outside of a group."""
    return int(os.environ["RANK"]) if shared is not None or is_worker() else 0


def started() -> ProcessCounts:
    """Processes of the group that this rank belongs to: `procs` over all nodes, and `per_node`, as
    far as the launcher says. Each is None outside of a group, and `nodes` always is."""
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    procs, per_node = (os.environ.get(name) if is_worker() else None for name in names)
    return ProcessCounts(
        procs=int(procs) if procs else None, per_node=int(per_node) if per_node else None
    )


def is_single_node() -> bool:
    """Whether every process of this one's group is known to be on this machine."""
    if shared is not None:
        return shared.store is not None
    found = started()
    return found.procs in (None, 1, found.per_node)
