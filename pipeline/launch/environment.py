"""What the environment says about who started this process."""

from __future__ import annotations

import os

CONTRACT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def is_worker() -> bool:
    """Whether this process is a rank under torchrun or something that speaks its contract."""
    return all(name in os.environ for name in CONTRACT)


def worker_rank() -> int:
    """This process's rank; 0 when it is no worker."""
    return int(os.environ["RANK"]) if is_worker() else 0


def worker_world_size() -> int | None:
    """Processes of the group that this rank belongs to; None outside of one."""
    return int(os.environ["WORLD_SIZE"]) if is_worker() else None


def worker_local_world_size() -> int | None:
    """Those of them on this machine; None outside of a group, and where the launcher does not
    tell."""
    told = os.environ.get("LOCAL_WORLD_SIZE")
    return int(told) if is_worker() and told else None
