"""Collection of reference cycles while libraries are imported, which Python does far too often."""

from __future__ import annotations

import gc

AS_USUAL = gc.get_threshold()
RARELY = (100_000, 50, 100)
"""Thresholds of the collector: allocations minus deallocations before the young are collected, and
so on. An import of torch and transformers makes four times as many, and nearly all stay."""


def collect_rarely() -> None:
    """Let garbage wait; for the start of a process."""
    gc.set_threshold(*RARELY)


def collect_as_usual(*, but_now: bool = False) -> None:
    """Undo `collect_rarely`. With `but_now` collections look at nothing that is there already,
    until `gc.unfreeze`."""
    if but_now:
        gc.freeze()
    gc.set_threshold(*AS_USUAL)
