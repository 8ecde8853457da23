"""How torch's DistributedDataParallel puts gradients into buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

FIRST = 1 << 20
"""Bytes of torch's first bucket."""


def cut(parameters: Sequence[T], size: Callable[[T], int], cap: int) -> Iterator[list[T]]:
    """Trained parameters from the last to the first, in buckets that are full at `cap` bytes."""
    bucket: list[T] = []
    filled, full = 0, FIRST
    for parameter in reversed(parameters):
        bucket.append(parameter)
        filled += size(parameter)
        if filled >= full:
            yield bucket
            bucket, filled, full = [], 0, cap
    if bucket:
        yield bucket
