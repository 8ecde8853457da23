"""Sizes of numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a number in each dtype of the precision policy, in bytes."""

    master: int
    compute: int
    reduce: int
