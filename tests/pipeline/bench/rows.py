"""Invented rows of a benchmark."""

from __future__ import annotations

from typing import Any

from pipeline.bench.session import Memory, Row, RunMeasurement, Speed


def speed(median: float, spread: float = 0.0, steps: int = 3) -> Speed:
    return Speed(median=median, low=median - spread, high=median + spread, steps=steps)


def row(
    strategy: str, procs: int, tokens: float, spread: float = 0.0, steps: int = 3, **facts: Any
) -> Row:
    told: dict[str, Any] = {
        "data_wait_share": 0.01, "communication_share": 0.1, "first_step_seconds": 5.0,
        "checkpoint_seconds": 0.5, "checkpoint_stall_seconds": 0.1, "tokens_per_step": 64.0,
        "samples_per_step": 8, "memory": Memory(kind="device", measured=3 << 29, predicted=1 << 30),
        "steps_left_out": 0,
    } | facts  # fmt: skip
    one = RunMeasurement(
        tokens_per_second=speed(tokens, spread, steps), step_seconds=speed(0.5), **told
    )
    return Row(strategy=strategy, use=f"wrap.{strategy}", procs=procs, measured=one)
