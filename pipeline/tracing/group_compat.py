"""A process group of any size in one process, in which nothing is sent: torch's own for its tests;
a contract test guards it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from pipeline.launch.environment import stay_on_loopback


def silent_group(ranks: int) -> AbstractContextManager[None]:
    """Inside, this process is rank 0 of so many. Every collective is over at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return _group("fake", FakeStore(), ranks)


def single_group() -> AbstractContextManager[None]:
    """Inside, this process is a group of its own, which really sends. DistributedDataParallel needs
    the results of its collectives, which a silent group has not."""
    stay_on_loopback()
    return _group("gloo", dist.HashStore(), 1)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _group(backend: str, store: Any, ranks: int) -> Iterator[None]:
    hook = sys.excepthook  # torch puts the rank in front of what this prints
    dist.init_process_group(backend, store=store, rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
