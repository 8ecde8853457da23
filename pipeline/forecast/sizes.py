"""Sizes of numbers."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.artifacts import Precision

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of a number in a recipe's dtypes."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a number in each dtype of the precision policy, in bytes."""

    master: int
    compute: int
    reduce: int

    @classmethod
    def of(cls, precision: Precision) -> Sizes:
        """Those of a policy."""
        return cls(
            master=BYTES[precision.master],
            compute=BYTES[precision.compute],
            reduce=BYTES[precision.reduce],
        )
