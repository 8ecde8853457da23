"""The numbers of a benchmark, and the arithmetic on them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

SPREAD_STEPS = 3
"""Fewest steps whose extremes say how far others would be from their median."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A number that every measured step has."""

    median: float
    low: float
    """Of the steps."""
    high: float
    steps: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Speed:
        """Of at least one value."""
        found = sorted(values)
        return cls(median=statistics.median(found), low=found[0], high=found[-1], steps=len(found))

    @property
    def spread(self) -> float | None:
        """Half of the distance between the steps' extremes, relative to the median; None where
        there are too few steps to tell."""
        if self.steps < SPREAD_STEPS:
            return None
        return (self.high - self.low) / 2 / self.median


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak of the worst rank, in bytes."""

    kind: Literal["device", "host"]
    """`device`: what torch's tensors took of its GPU. `host`: what was resident beyond what was
    before the model had memory."""
    measured: int | None = None
    predicted: int | None = None
    """Of tensors."""

    @property
    def ratio(self) -> float | None:
        """RunMeasurement to predicted; None for resident memory, which is not of tensors alone."""
        if self.kind == "host" or not self.measured or not self.predicted:
            return None
        return self.measured / self.predicted


@dataclass(frozen=True, kw_only=True)
class RunMeasurement:
    """What a run that came to its end has told."""

    tokens_per_second: Speed
    """Of all ranks, without padding."""
    step_seconds: Speed
    steps_left_out: int
    """Of those to be measured: no update came of them."""
    tokens_per_step: float
    """Median."""
    samples_per_step: int
    data_wait_share: float
    communication_share: float | None
    first_step_seconds: float
    """From the start of the command."""
    checkpoint_seconds: float | None
    """From the beginning of the save to the last byte on disk."""
    checkpoint_stall_seconds: float | None
    memory: Memory


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy on so many processes."""

    strategy: str
    use: str
    procs: int
    measured: RunMeasurement | None = None
    error: str = ""
    """One line, where there are no numbers."""
    efficiency: float | None = None
    """T_N / (N * T_1), or with the smallest measured number of processes in place of 1."""
    efficiency_base: int | None = None
    """That number."""

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.strategy} on {self.procs} process{'es' * (self.procs != 1)}"

    @property
    def speed(self) -> Speed | None:
        """Tokens a second."""
        return None if self.measured is None else self.measured.tokens_per_second


def measured(
    records: Sequence[Mapping[str, Any]], *, warmup: int, began: float, predicted: int | None
) -> RunMeasurement:
    """From a run's `metrics.jsonl`. `began` is when its command started, seconds since the epoch;
    the first `warmup` steps are left out, those that were profiled, and those that no update came
    of. Raises ValueError when no step is left."""
    steps = [record for record in records if "loss" in record]
    plain = [record for record in steps if not record.get("profiled")]
    counted = [record for record in plain[warmup:] if _is_applied(record)]
    if not plain[warmup:]:
        raise ValueError("the run has told of no step after its warm-up")
    if not counted:
        raise ValueError("no update came of any step after the warm-up: more --warmup may help")
    seconds = sum(record["step_seconds"] for record in counted)
    waited = sum(record["data_wait_share"] * record["step_seconds"] for record in counted)
    profiled = next((r for r in steps if r.get("profiled") and _is_applied(r)), {})
    saved = next((record for record in records if "checkpoint_seconds" in record), {})
    tokens = [record["tokens_per_second"] * record["step_seconds"] for record in counted]
    samples = [round(r["samples_per_second"] * r["step_seconds"]) for r in counted]
    return RunMeasurement(
        tokens_per_second=Speed.of(record["tokens_per_second"] for record in counted),
        step_seconds=Speed.of(record["step_seconds"] for record in counted),
        steps_left_out=len(plain[warmup:]) - len(counted),
        tokens_per_step=statistics.median(tokens),
        samples_per_step=round(statistics.median(samples)),
        data_wait_share=waited / seconds,
        communication_share=profiled.get("communication_share"),
        first_step_seconds=steps[0]["time"] - began,
        checkpoint_seconds=saved.get("checkpoint_seconds"),
        checkpoint_stall_seconds=saved.get("checkpoint_stall_seconds"),
        memory=_memory(plain[-1], predicted),
    )


def _is_applied(record: Mapping[str, Any]) -> bool:
    """Train stages without loss scaling need not say so."""
    return bool(record.get("applied", True))


def _memory(record: Mapping[str, Any], predicted: int | None) -> Memory:
    if "peak_memory_bytes" in record:
        return Memory(kind="device", measured=record["peak_memory_bytes"], predicted=predicted)
    host = record.get("peak_host_memory_bytes")
    return Memory(kind="host", measured=host, predicted=predicted)


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """The rows with their scaling efficiency, each strategy's relative to its own run on the fewest
    processes."""
    bases: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.procs):
        if row.speed is not None:
            bases.setdefault(row.strategy, row)
    return [_efficient(row, bases.get(row.strategy)) for row in rows]


def _efficient(row: Row, base: Row | None) -> Row:
    if base is None or base.speed is None or row.speed is None:
        return row
    for_each = base.speed.median / base.procs
    share = row.speed.median / row.procs / for_each
    return replace(row, efficiency=share, efficiency_base=base.procs)


def distinguishable(one: Speed, other: Speed) -> bool | None:
    """Whether two speeds are further apart than the wider of their spreads; None where these are
    not known."""
    if one.spread is None or other.spread is None:
        return None
    apart = abs(one.median - other.median)
    return apart > max(one.spread * one.median, other.spread * other.median)
