"""Rules of which checkpoints to keep, and the number that there will be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from pipeline.checkpoint.manifest import FILE, Manifest
from pipeline.checkpoint.store import Store, step_number
from pipeline.contracts.training import TrainingLength
from pipeline.errors import CheckpointError, in_words


class Retention(BaseModel):
    """Rules of which any keeps a checkpoint; without `last`, all are kept."""

    last: int | None = None
    """Number of the newest checkpoints to keep."""
    every: int | None = None
    """Divisor of the steps whose checkpoints are kept for good."""
    best: int = 0
    """Number of checkpoints with the lowest held-out loss to keep."""


def purge(store: Store, retention: Retention) -> list[str]:
    """Delete the checkpoints that need not be kept; call after a commit. Returns warnings about
    those that cannot be deleted, whatever the reason: the new checkpoint is there all the same."""
    warnings = []
    try:
        for name in _unneeded(store, retention):
            try:
                store.delete(name)
            except OSError as error:
                reason = error.strerror or error
                warnings.append(f"{store.locate(name)} cannot be deleted: {reason}")
    except Exception as error:
        warnings.append(f"older checkpoints cannot be deleted: {in_words(error)}")
    return warnings


def _unneeded(store: Store, retention: Retention) -> Iterator[str]:
    if retention.last is None:
        return
    names = list(store.names())
    old = names[: -retention.last]
    best = best_of(store, names, retention.best) if retention.best and old else set()
    for name in old:
        step = step_number(name) or 0
        if name not in best and not (retention.every and step % retention.every == 0):
            yield name


def best_of(store: Store, names: Sequence[str], count: int) -> set[str]:
    """The `count` checkpoints with the lowest known held-out loss."""
    losses = {name: _stored_loss(store, name) for name in names}
    ranked = sorted((loss, name) for name, loss in losses.items() if loss is not None)
    return {name for _, name in ranked[:count]}


def heldout_loss(manifest: Manifest) -> float | None:
    """The held-out loss of the checkpoint's weights; None where it is not known."""
    metrics = manifest.progress.get("metrics")
    loss = metrics.get("eval_loss") if isinstance(metrics, Mapping) else None
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def _stored_loss(store: Store, name: str) -> float | None:
    try:
        return heldout_loss(Manifest.load(store.get(name, FILE), name))
    except (OSError, CheckpointError):
        return None


@dataclass(frozen=True, kw_only=True)
class ExpectedCount:
    """The largest number of checkpoints that a training has at once."""

    number: int
    """Maximum, with the one that is being written."""
    further: int | None = None
    """Steps that bring one more permanent checkpoint, if the number of steps is unknown."""

    def __str__(self) -> str:
        text = f"{self.number} checkpoint{'s' * (self.number > 1)}"
        return text if self.further is None else f"{text}, and one more every {self.further} steps"


def expected_count(
    retention: Retention, every: int | None, length: TrainingLength
) -> ExpectedCount:
    """Count the checkpoints of a training that saves each `every` steps (None: only at the end)."""
    if length.steps is None:
        return _open_ended(retention, every, length)
    saved = _saved(retention, every, length, length.steps)
    if retention.last is None:
        return ExpectedCount(number=len(saved))
    older = saved[:-1]
    if not retention.best:  # or those of evaluations, which may be saved or not, are the newest
        older = older[: -retention.last]
    period = retention.every
    for_good = sum(step % period == 0 for step in older) if period else 0
    most = retention.last + for_good + retention.best + 1
    return ExpectedCount(number=min(most, len(saved)))


def _saved(
    retention: Retention, every: int | None, length: TrainingLength, steps: int
) -> Sequence[int]:
    """Steps after which one may be saved, in order."""
    saved = {steps}
    if every:
        saved.update(range(every, steps, every))
    if length.saves_first or (retention.best and length.eval_first):
        saved.add(0)
    if retention.best and length.eval_every:
        saved.update(range(length.eval_every, steps, length.eval_every))
    return sorted(saved)


def _open_ended(retention: Retention, every: int | None, length: TrainingLength) -> ExpectedCount:
    period = every or (length.eval_every if retention.best else None)
    if period is None:
        return ExpectedCount(number=1 + length.saves_first)
    if retention.last is None:
        return ExpectedCount(number=2, further=period)
    number = retention.last + retention.best + 1
    further = None if retention.every is None else math.lcm(period, retention.every)
    return ExpectedCount(number=number, further=further)
