"""Collection of reference cycles at steps that are the same on every rank.

Left to itself, Python collects after some number of allocations: each rank in another step, in
which the others wait for it, and time and again all objects of all libraries.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

EVERY = 50
"""Steps between two collections."""


@contextlib.contextmanager
def collected_at_steps() -> Iterator[None]:
    """Collect nothing by itself in the body, and never look at what is there before it."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def collect_behind(step: int) -> None:
    """Collect young garbage, if it is time after the step of this number."""
    if step % EVERY == 0:
        gc.collect(1)


@contextlib.contextmanager
def collected_as_usual() -> Iterator[None]:
    """Leave it to Python in the body, which is a pause between steps, and collect afterwards what
    died since the pause before."""
    was_on = gc.isenabled()
    gc.enable()
    try:
        yield
    finally:
        gc.collect()
        if not was_on:
            gc.disable()
