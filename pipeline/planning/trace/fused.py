"""Compiled code in a trace, counted as fused kernels, which write only what a product reads, or
what is left at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field


@dataclass
class Region:
    """Code that is compiled as one. sizes: storages that it has made so far, and their bytes, those
    left out that were counted."""

    sizes: dict[int, int] = field(default_factory=dict)

    def add(self, storages: Iterable[tuple[int, int]]) -> None:
        """Note new storages, as key and bytes."""
        self.sizes.update(storages)

    def written(self, keys: Iterable[int]) -> int:
        """Return the bytes of those of some storages that are written to memory, counted once."""
        return sum(self.sizes.pop(key, 0) for key in keys)


Count = Callable[[bool], contextlib.AbstractContextManager[None]]
"""Takes whether a piece of compiled code recomputes what activation checkpointing did not keep, and
counts the piece in its body."""
_active: list[Count] = []


@contextlib.contextmanager
def region(*, again: bool) -> Iterator[None]:
    """Run a piece of compiled code in the body, as the innermost `counted_by` says; `again`
    where it recomputes."""
    with _active[-1](again) if _active else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def counted_by(count: Count) -> Iterator[None]:
    """Inside, run each piece of compiled code within `count(again)`."""
    _active.append(count)
    try:
        yield
    finally:
        _active.pop()
