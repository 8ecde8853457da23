"""The end of a measured export: when everything is written, and when it is on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from apart.child import Place, Work


def flushed(call: Callable[[], object], out: Path, place: Place) -> Work:
    """Make the call, then flush the files in `out` to disk."""

    def work() -> dict[str, float]:
        began = time.perf_counter()
        call()
        place.barrier()
        written = time.perf_counter() - began
        for file in out.rglob("*") if place.rank == 0 else ():
            _sync(file)
        return {"written": written}

    return work


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
