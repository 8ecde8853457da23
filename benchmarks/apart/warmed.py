"""Run a task on a tiny model first, so that all imports and set-up are done."""

from __future__ import annotations

import ctypes
import gc

from apart.child import Job, Place, Work, task


def warmed(job: Job, place: Place) -> Work:
    """Run the task `job["task"]` with the changes in `job["tiny"]`, then prepare the real one."""
    same = task(job["task"])
    same({**job, **job["tiny"]}, place)()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or memory that is freed and used again would not be counted
    return same(job, place)
