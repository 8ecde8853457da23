"""Numbers of `metrics.jsonl` that plugins write next to those of the training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pipeline.execution.metrics import OWN, kind_of, numbers

MEASURED_KINDS = ("step", "evaluation", "other")
"""Kinds of records in which plugins' numbers are looked for."""


def measured(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield names and values of the numbers in a record that the training does not write."""
    if kind_of(record) in MEASURED_KINDS:
        yield from ((name, value) for name, value in numbers(record) if name not in OWN)


def names(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of all plugins' numbers, in the order in which they appear."""
    return list(dict.fromkeys(name for record in records for name, _ in measured(record)))


def newest(records: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, float]]:
    """Return name -> step and value of each of them, the last that was written."""
    return {name: (record["step"], value) for record in records for name, value in measured(record)}
