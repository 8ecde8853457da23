"""Numbers of `metrics.jsonl` that plugins write next to those of the training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pipeline.execution.metrics import kind_of

OWN = frozenset(
    (
        "step", "time", "total_steps", "tokens", "samples", "loss", "eval_loss", "perplexity",
        "grad_norm", "lr", "applied", "loss_scale", "step_seconds", "tokens_per_second",
        "tokens_per_second_per_rank", "target_tokens_per_second", "samples_per_second",
        "data_wait_share", "mfu", "peak_memory_bytes", "peak_host_memory_bytes", "profiled",
        "compute_share", "communication_share", "data_share", "idle_share", "best_step",
        "best_eval_loss", "best_perplexity",
    )
)  # fmt: skip
"""Fields that the training itself writes into records of steps and evaluations."""
KINDS = ("step", "evaluation", "other")
"""Kinds of records in which plugins' numbers are looked for."""


def measured(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield names and values of the numbers in a record that the training does not write."""
    if kind_of(record) in KINDS:
        for name, value in record.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and name not in OWN:
                yield name, float(value)


def names(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of all plugins' numbers, in the order in which they appear."""
    return list(dict.fromkeys(name for record in records for name, _ in measured(record)))


def newest(records: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, float]]:
    """Return name -> step and value of each of them, the last that was written."""
    return {name: (record["step"], value) for record in records for name, value in measured(record)}
