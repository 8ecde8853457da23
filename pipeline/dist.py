"""This process's place among the run's processes. The only file that starts a process group."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

LONG_WAIT = datetime.timedelta(hours=24)
"""For waits on work of unknown length (tokenising a corpus, exporting a model). A dead peer ends
them early: the launcher stops the whole run."""

_CALLS = itertools.count()
"""Every rank makes the same calls in the same order, so counting them gives common keys."""


@dataclass(kw_only=True)
class Dist:
    """Rank, world and device of this process; every wait between processes goes through here."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    device: torch.device
    store: Store | None = None
    """Key-value store of the run; None exactly when there is one process and no group."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes shared files and speaks on screen."""
        return self.rank == 0

    def _next_key(self, what: str) -> str:
        return f"pipe/{what}/{next(_CALLS)}"

    def barrier(self) -> None:
        """Wait for all ranks, however long that takes; uses the store, so no collective times out."""
        if self.store is None or self.world_size == 1:
            return
        key = self._next_key("barrier")
        if self.store.add(key, 1) == self.world_size:
            self.store.set(f"{key}/open", b"1")
        self.store.wait([f"{key}/open"], LONG_WAIT)

    def share(self, value: str | None) -> str:
        """Rank 0's text, on every rank. Other ranks pass None."""
        if self.store is None or self.world_size == 1:
            assert value is not None
            return value
        key = self._next_key("share")
        if self.is_main:
            assert value is not None
            self.store.set(key, value.encode())
            return value
        self.store.wait([key], LONG_WAIT)
        return bytes(self.store.get(key)).decode()

    @contextlib.contextmanager
    def main_first(self) -> Iterator[bool]:
        """Rank 0 runs the body first, the others after it has finished; yields whether this is rank 0.

        For work whose result is a file: rank 0 makes it, the others find it.
        """
        if not self.is_main:
            self.barrier()
        yield self.is_main
        if self.is_main:
            self.barrier()


def environment_dist(*, device: str) -> Dist:
    """Join the process group that the launcher's environment describes (RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; the torchrun contract).

    `device` is `cpu` or `cuda`. A group is started for one process too, because strategies need one.
    """
    import torch
    import torch.distributed as dist

    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        place = torch.device("cuda", local_rank)
        backend = "cpu:gloo,cuda:nccl"
    else:
        place = torch.device("cpu")
        backend = "gloo"
    if not dist.is_initialized():
        if "MASTER_ADDR" in os.environ:
            dist.init_process_group(backend, device_id=place if device == "cuda" else None)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return Dist(
        rank=rank,
        world_size=dist.get_world_size(),
        local_rank=local_rank,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        device=place,
        store=dist.distributed_c10d._get_default_store(),
    )
