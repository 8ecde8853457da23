"""Pseudo-random fp32 numbers for any range of any tensor, a pure function of its name.

No tensor needs to be in memory as a whole, and a part in a wrong place is detected.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

BLOCK = 1 << 20
"""Elements that share a mask."""
_KEEP, _EXPONENT = np.uint32(0x807FFFFF), np.uint32(0x3C000000)
"""Bits that are random: sign and mantissa. Absolute values are in [2^-7, 2^-6), as weights' are."""


def floats(key: str, start: int, stop: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield elements [start, stop) of the flattened tensor `key`, in order, a few MiB at a time."""
    while start < stop:
        number, first = divmod(start, BLOCK)
        last = min(BLOCK, first + stop - start)
        mask = np.uint32(xxh3_64_intdigest(f"{key}/{number}".encode()) & 0xFFFFFFFF)
        bits = _base()[first:last] ^ mask
        bits &= _KEEP
        bits |= _EXPONENT
        yield bits.view(np.float32)
        start += last - first


def array(key: str, start: int, stop: int) -> np.ndarray[Any, Any]:
    """Return elements [start, stop) in one array."""
    found = np.empty(stop - start, np.float32)
    done = 0
    for part in floats(key, start, stop):
        found[done : done + len(part)] = part
        done += len(part)
    return found


@functools.cache
def _base() -> np.ndarray[Any, Any]:
    return np.random.default_rng(7).integers(0, 1 << 32, BLOCK, np.uint32)
