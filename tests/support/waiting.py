"""Waiting for something in another thread or process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil


def becomes(condition: Callable[[], object], limit: float = 20.0) -> bool:
    """Return whether the condition becomes true within `limit` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def descendants(pid: int, name: str, limit: float = 120.0) -> list[psutil.Process]:
    """Return the processes that a process has started, directly or not, once one of them has a
    name."""
    found: list[psutil.Process] = []

    def there() -> bool:
        found[:] = psutil.Process(pid).children(recursive=True)
        with contextlib.suppress(psutil.NoSuchProcess):  # of a process that has ended meanwhile
            return any(child.name() == name for child in found)
        return False

    assert becomes(there, limit), found
    return found
