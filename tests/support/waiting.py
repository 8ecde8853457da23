"""Waiting for something in another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable


def becomes(condition: Callable[[], object], limit: float = 20.0) -> bool:
    """Return whether the condition becomes true within `limit` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
