"""A run's records by training: each has its own steps, curves, mean speed and results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.chain.registry import Registry
from pipeline.chain.trainings import trains
from pipeline.errors import PluginError
from pipeline.execution.metrics import OWN, by_training, kind_of, numbers


@dataclass(frozen=True, kw_only=True)
class Training:
    """The measurements of a training so far."""

    slot: str
    """The slot that trains; empty in a run of one training."""
    metrics: list[dict[str, Any]]
    """Its records of `metrics.jsonl`, in order."""

    def named(self, text: str) -> str:
        """Return a label for people, which tells the run's trainings apart."""
        return f"{self.slot} {text}".strip()

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Records of steps; the newest has the total of the run's newest start, and no fewer than
        are done."""
        steps: list[dict[str, Any]] = []
        total = 0
        for record in self.metrics:
            total = record.get("total_steps") or total
            if "loss" in record:
                steps.append(record)
        if steps and total:
            steps[-1] = {**steps[-1], "total_steps": max(total, steps[-1]["step"])}
        return steps

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Records of evaluations."""
        return [record for record in self.metrics if "eval_loss" in record]

    @property
    def best(self) -> dict[str, Any] | None:
        """Lowest held-out loss, `eval_loss`, and its `step`, which every record repeats since the
        first evaluation; None before that."""
        known = (one for one in reversed(self.metrics) if one.get("best_step") is not None)
        best = next(known, None)
        return best and {"step": best["best_step"], "eval_loss": best["best_eval_loss"]}

    @property
    def ended_early(self) -> str:
        """Why it ended before its last step; empty if it did not, or went on since."""
        reason = ""
        for record in self.metrics:
            if "ended_early" in record:
                reason = record["ended_early"]
            elif "loss" in record:
                reason = ""
        return reason


def trainings_in(
    records: Iterable[dict[str, Any]], slots: Callable[[], Sequence[str]]
) -> list[Training]:
    """Return the trainings of a run's records, in order; one without records if there are none.
    `slots` returns the slots that train, and is called if there are several."""
    found = by_training(records)
    if found.keys() <= {""}:
        return [Training(slot="", metrics=found.get("", []))]
    first, *others = slots() or ("the first training",)
    keys = [key for key in dict.fromkeys(["", *others, *found]) if key in found]
    return [Training(slot=key or first, metrics=found[key]) for key in keys]


def slots_that_train(uses: Mapping[str, str]) -> list[str]:
    """Return the slots that train, of slots with the names of their stages; those whose stage is
    not installed here are passed over."""
    registry, found = Registry.installed(), list[str]()
    for slot, use in uses.items():
        with contextlib.suppress(PluginError):
            found += [slot] if use in registry and trains(registry.load(use)) else []
    return found


WEIGHTED = ("tokens_per_second", "mfu", "data_wait_share")
"""Fields of a step's record whose means are taken over time."""


@dataclass
class MeanSpeed:
    """Means over all steps so far, weighted by the time of each: `tokens_per_second` is the number
    of tokens divided by the time of training."""

    steps: int = 0
    """Steps whose time is known."""
    seconds: float = 0.0
    """Their time in seconds, evaluations and saves left out."""
    _sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Field -> sum of value times seconds, and sum of seconds."""

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> MeanSpeed:
        """Return the means over these steps' records."""
        speed = cls()
        for record in records:
            speed.add(record)
        return speed

    def add(self, record: Mapping[str, Any]) -> None:
        """Include a step's record; one without a time changes nothing."""
        seconds = record.get("step_seconds")
        if seconds is None:
            return
        self.steps += 1
        self.seconds += seconds
        for name in WEIGHTED:
            if record.get(name) is not None:
                total, time = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = total + record[name] * seconds, time + seconds

    def mean(self, name: str) -> float | None:
        """Return the mean of one of WEIGHTED over the steps that have it; None if none has."""
        total, time = self._sums.get(name, (0.0, 0.0))
        return total / time if time > 0 else None

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step; None before the first."""
        return self.seconds / self.steps if self.steps else None


MEASURED_KINDS = ("step", "evaluation", "other")
"""Kinds of records in which plugins' numbers are looked for."""


def measured(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield names and values of the numbers in a record that the training does not write."""
    if kind_of(record) in MEASURED_KINDS:
        yield from ((name, value) for name, value in numbers(record) if name not in OWN)


def measured_names(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of all plugins' numbers, in the order in which they appear."""
    return list(dict.fromkeys(name for record in records for name, _ in measured(record)))


def newest_measured(records: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, float]]:
    """Return name -> step and value of each of them, the last that was written."""
    return {name: (record["step"], value) for record in records for name, value in measured(record)}
