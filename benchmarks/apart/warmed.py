"""Do the same on a tiny model first: that imports and sets up all that it needs."""

from __future__ import annotations

import ctypes
import gc

from apart.child import Job, Place, Work, task


def warmed(job: Job, place: Place) -> Work:
    """The task `job["task"]`, after the same with what is different in `job["tiny"]`."""
    same = task(job["task"])
    same({**job, **job["tiny"]}, place)()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or the memory that it has freed would not be counted again
    return same(job, place)
