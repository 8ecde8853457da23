"""Commands that work for a while, and leave nothing behind when they are stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pipeline.errors import RunStopped
from pipeline.launch.signals import Interrupted, interruptible

FORCE_SECONDS = 10.0
"""After which a stopped command ends even if something keeps it from cleaning up."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP leave the body as an exception does: its folders are removed and
    its processes ended. Raises RunStopped then."""
    with interruptible(force_after=FORCE_SECONDS):
        try:
            yield
        except Interrupted as interrupted:
            number = interrupted.number
            raise RunStopped(number, f"stopped by {number.name}") from None
