"""The numbers of a benchmark, and the arithmetic on them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeline.errors import StageError
from pipeline.utils.text import plural

SPREAD_STEPS = 3
"""Fewest steps whose extremes give a spread."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Median and extremes of a number over the measured steps."""

    median: float
    low: float
    high: float
    steps: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Speed:
        """The speed of at least one value."""
        found = sorted(values)
        return cls(median=statistics.median(found), low=found[0], high=found[-1], steps=len(found))

    @property
    def spread(self) -> float | None:
        """Half of the distance between the extremes, relative to the median; None for few steps."""
        return (self.high - self.low) / 2 / self.median if self.steps >= SPREAD_STEPS else None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak of the fullest rank in bytes, measured, and predicted for the plan's tensors."""

    kind: Literal["device", "host"]
    """`device`: tensors on the rank's GPU. `host`: resident memory beyond that before the model."""
    measured: int | None = None
    predicted: int | None = None

    @property
    def ratio(self) -> float | None:
        """Measured to predicted; None for resident memory, which is not only of tensors."""
        if self.kind == "host" or not self.measured or not self.predicted:
            return None
        return self.measured / self.predicted


@dataclass(frozen=True, kw_only=True)
class RunMeasurement:
    """The numbers of a successful run. Tokens and samples are over all ranks."""

    tokens_per_second: Speed
    """Tokens without padding."""
    step_seconds: Speed
    steps_left_out: int
    """Steps after warm-up whose update loss scaling skipped."""
    tokens_per_step: float
    samples_per_step: int
    data_wait_share: float
    communication_share: float | None
    first_step_seconds: float
    """Time from the start of the command to the end of the first step."""
    checkpoint_seconds: float | None
    """Time from the beginning of the save to the last byte on disk."""
    checkpoint_stall_seconds: float | None
    memory: Memory


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy on a number of processes, with its numbers or its error in one line."""

    strategy: str
    use: str
    procs: int
    measured: RunMeasurement | None = None
    error: str = ""
    efficiency: float | None = None
    """T_N / (N * T_1), or with `efficiency_base` instead of 1."""
    efficiency_base: int | None = None
    """Smallest number of processes of the strategy's runs."""

    @property
    def label(self) -> str:
        """`fsdp on 2 processes`."""
        return f"{self.strategy} on {plural(self.procs, 'process')}"

    @property
    def speed(self) -> Speed | None:
        """Tokens per second."""
        return None if self.measured is None else self.measured.tokens_per_second


def measured(
    records: Sequence[Mapping[str, Any]], *, warmup: int, began: float, predicted: int | None
) -> RunMeasurement:
    """The numbers in a run's `metrics.jsonl`, without the first `warmup` steps, profiled steps and
    steps without an update; `began` is the start of its command (epoch seconds). Raises StageError
    if no step is left."""
    steps = [record for record in records if "loss" in record]
    plain = [record for record in steps if not record.get("profiled")]
    counted = [record for record in plain[warmup:] if _is_applied(record)]
    if not plain[warmup:]:
        raise StageError("no steps were recorded after warm-up")
    if not counted:
        raise StageError("no step after warm-up updated the model", hint="more --warmup may help")
    waited = sum(record["data_wait_share"] * record["step_seconds"] for record in counted)
    profiled = next((r for r in steps if r.get("profiled") and _is_applied(r)), {})
    saved = {**_last(records, "checkpoint_stall_seconds"), **_last(records, "checkpoint_seconds")}
    tokens = [record["tokens_per_second"] * record["step_seconds"] for record in counted]
    samples = [round(r["samples_per_second"] * r["step_seconds"]) for r in counted]
    kind: Literal["device", "host"] = "device" if "peak_memory_bytes" in plain[-1] else "host"
    peak = plain[-1].get("peak_memory_bytes" if kind == "device" else "peak_host_memory_bytes")
    return RunMeasurement(
        tokens_per_second=Speed.of(record["tokens_per_second"] for record in counted),
        step_seconds=Speed.of(record["step_seconds"] for record in counted),
        steps_left_out=len(plain[warmup:]) - len(counted),
        tokens_per_step=statistics.median(tokens),
        samples_per_step=round(statistics.median(samples)),
        data_wait_share=waited / sum(record["step_seconds"] for record in counted),
        communication_share=profiled.get("communication_share"),
        first_step_seconds=steps[0]["time"] - began,
        checkpoint_seconds=saved.get("checkpoint_seconds"),
        checkpoint_stall_seconds=saved.get("checkpoint_stall_seconds"),
        memory=Memory(kind=kind, measured=peak, predicted=predicted),
    )


def _last(records: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """Return the newest record with a field; an empty one if there is none."""
    return next((record for record in reversed(records) if name in record), {})


def _is_applied(record: Mapping[str, Any]) -> bool:
    """Whether the step updated the model; records without the field did."""
    return bool(record.get("applied", True))


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """The rows with their scaling efficiency, relative to the strategy's smallest run."""
    bases: dict[str, tuple[int, float]] = {}
    for row in sorted(rows, key=lambda row: row.procs):
        if row.speed:
            bases.setdefault(row.strategy, (row.procs, row.speed.median / row.procs))
    return [_efficient(row, *bases[row.strategy]) if row.speed else row for row in rows]


def _efficient(row: Row, base: int, speed_of_one: float) -> Row:
    assert row.speed is not None
    share = row.speed.median / row.procs / speed_of_one
    return replace(row, efficiency=share, efficiency_base=base)


def distinguishable(one: Speed, other: Speed) -> bool | None:
    """Whether two speeds differ by more than the wider of their spreads; None if one has none."""
    if one.spread is None or other.spread is None:
        return None
    apart = abs(one.median - other.median)
    return apart > max(one.spread * one.median, other.spread * other.median)
