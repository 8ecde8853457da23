"""Environment variables in which a launcher gives a process its rank and world size."""

from __future__ import annotations

import os
import signal

from pipeline.chain.plan import Started

CONTRACT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
STORE = "PIPE_STORE"
"""The file where the ranks of one machine meet; `pipe` sets it, in place of MASTER_ADDR and
MASTER_PORT."""
JOB = "PIPE_JOB"
"""Environment variable: identity of the scheduler's job. Ranks of another one, whose port happens
to be the same, do not meet those of this one."""
TOKEN = "PIPE_RDZV_TOKEN"
"""Environment variable: a secret that all nodes must have, unless all are on this machine."""
FINISHED = 76
"""Exit code of a rank whose stages have all run. A library that calls exit(0) inside a rank ends it
too, so 0 does not prove that."""
STOPPED = 75
"""Exit code of a rank that was asked to stop and has saved what it had (EX_TEMPFAIL in
sysexits.h)."""
STACKS = "PIPE_STACKS"
"""Environment variable: the file in memory to which a rank writes its threads' stacks on DUMP."""
DUMP = signal.SIGRTMIN
"""Signal at which a rank writes its threads' stacks, whatever it is doing."""
LOOPBACK = "lo"
"""Loopback interface, which is up on every machine and enough within one."""


def is_worker() -> bool:
    """Whether this process is a rank under torchrun or a launcher with the same contract."""
    return STORE in os.environ or all(name in os.environ for name in CONTRACT)


def place(rank: int, procs: int) -> dict[str, str]:
    """Environment of a process that is `rank` among `procs`, all on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(procs),
        "LOCAL_WORLD_SIZE": str(procs),
    }


def worker_rank() -> int:
    """This process's rank; 0 outside of a group."""
    return int(os.environ["RANK"]) if is_worker() else 0


def worker_world_size() -> int | None:
    """Processes of the group that this rank belongs to; None outside of one."""
    return int(os.environ["WORLD_SIZE"]) if is_worker() else None


def worker_local_world_size() -> int | None:
    """Number of processes of the group on this machine; None outside of a group, and where the
    launcher does not say."""
    size = os.environ.get("LOCAL_WORLD_SIZE")
    return int(size) if is_worker() and size else None


def started() -> Started:
    """Processes that another launcher has started, as far as it says."""
    return Started(procs=worker_world_size(), per_node=worker_local_world_size())


def all_here() -> bool:
    """Whether every process of this one's group is known to be on this machine."""
    return worker_world_size() in (None, 1, worker_local_world_size())


def stay_on_loopback() -> None:
    """Make gloo and NCCL listen on the loopback interface alone, whatever the environment says for
    runs of several nodes."""
    os.environ |= {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": f"={LOOPBACK}"}
