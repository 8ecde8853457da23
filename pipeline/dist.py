"""This process's place among the run's processes. The only file that starts a process group."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.launch.environment import is_worker

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

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
    _spent: list[str] = field(default_factory=list, init=False, repr=False)
    """Keys that rank 0 may delete once every rank has come to a later call."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes shared files and speaks on screen."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks, however long that takes; uses the store, so no collective times
        out."""
        if self.store is None or self.world_size == 1:
            return
        key = _next_key("barrier")
        opened = f"{key}/open"
        if self.store.add(key, 1) == self.world_size:
            self.store.set(opened, "1")
        self.store.wait([opened], LONG_WAIT)
        self._forget()
        self._spent += [key, opened]

    def share(self, value: str | None) -> str:
        """Rank 0's text, on every rank. Other ranks pass None."""
        if self.store is None or self.world_size == 1:
            assert value is not None
            return value
        key = _next_key("share")
        self._spent.append(key)
        if self.is_main:
            assert value is not None
            self.store.set(key, value)
            return value
        return receive(self.store, key)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank."""
        if self.world_size == 1:
            return [json.loads(json.dumps(value))]
        import torch
        import torch.distributed as dist

        self.barrier()  # which waits longer than a collective may
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([text.numel()]))
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: text.numel()] = text
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(texts, padded)
        return [
            json.loads(text.numpy()[: int(size)].tobytes())
            for text, size in zip(texts, sizes, strict=True)
        ]

    @contextlib.contextmanager
    def main_first(self) -> Iterator[bool]:
        """Rank 0 runs the body first, the others after it has finished; yields whether this is
        rank 0.

        For work whose result is a file: rank 0 makes it, the others find it. When rank 0 raises,
        the others wait until its end is noticed and the launcher stops them.
        """
        if not self.is_main:
            self.barrier()
        yield self.is_main
        if self.is_main:
            self.barrier()

    def _forget(self) -> None:
        """Delete the keys of earlier calls: all ranks have left those, as they are all here."""
        if self.is_main and self.store is not None:
            for key in self._spent:
                self.store.delete_key(key)
        self._spent.clear()


def _next_key(what: str) -> str:
    return f"pipe/{what}/{next(_CALLS)}"


def receive(store: Store, key: str) -> str:
    """The text under `key`, as soon as another rank has set it."""
    store.wait([key], LONG_WAIT)
    return bytes(store.get(key)).decode()


def environment_store() -> Store | None:
    """Meet the ranks that the launcher's environment describes (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT; the torchrun contract); None when there is no launcher."""
    from torch.distributed.rendezvous import rendezvous

    if not is_worker():
        return None
    store, _, _ = next(rendezvous("env://"))
    return store  # type: ignore[no-any-return]


def environment_dist(store: Store | None, *, device: str) -> Dist:
    """Start the process group of the ranks that meet in `store`, from `environment_store`.

    `device` is `cpu` or `cuda`. A group is started for one process too, because strategies need
    one.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    rank = int(os.environ.get("RANK", "0")) if store is not None else 0
    local_rank = int(os.environ.get("LOCAL_RANK", "0")) if store is not None else 0
    world_size = int(os.environ["WORLD_SIZE"]) if store is not None else 1
    place, backend = torch.device("cpu"), "gloo"
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        place, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
    common = store if store is not None else dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        backend,
        store=PrefixStore("group", common),
        rank=rank,
        world_size=world_size,
        device_id=place if device == "cuda" else None,
    )
    return Dist(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if store is not None else 1,
        device=place,
        store=common,
    )
