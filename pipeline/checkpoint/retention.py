"""Rules that decide which checkpoints are kept, and their largest number."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from pydantic import BaseModel

from pipeline.checkpoint.manifest import MANIFEST, Manifest
from pipeline.checkpoint.store import Store, step_number
from pipeline.contracts.training import TrainingLength
from pipeline.errors import CheckpointError, in_words


class Retention(BaseModel):
    """Rules that each keep a checkpoint; without `last`, all are kept."""

    last: int | None = None
    """Number of the newest checkpoints to keep."""
    every: int | None = None
    """Divisor of steps: checkpoints of its multiples are kept forever."""
    best: int = 0
    """Number of checkpoints with the lowest held-out loss to keep."""


def purge(store: Store, retention: Retention) -> list[str]:
    """Delete the checkpoints that need not be kept; call after a commit. Returns warnings about
    checkpoints that cannot be deleted, whatever the reason: the new checkpoint is there all the
    same."""
    warnings = []
    try:
        for name in unneeded(store, retention):
            try:
                store.delete(name)
            except OSError as error:
                reason = error.strerror or error
                warnings.append(f"{store.locate(name)} cannot be deleted: {reason}")
    except Exception as error:
        warnings.append(f"older checkpoints cannot be deleted: {in_words(error)}")
    return warnings


def unneeded(store: Store, retention: Retention) -> Iterator[str]:
    """Yield the names of the checkpoints that need not be kept, oldest first."""
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
    losses = []
    for name in names:
        with contextlib.suppress(OSError, CheckpointError):
            loss = heldout_loss(Manifest.load(store.get(name, MANIFEST), name))
            losses += [] if loss is None else [(loss, name)]
    return {name for _, name in sorted(losses)[:count]}


def heldout_loss(manifest: Manifest) -> float | None:
    """The held-out loss of the checkpoint's weights; None where it is not known."""
    metrics = manifest.progress.get("metrics")
    loss = metrics.get("eval_loss") if isinstance(metrics, Mapping) else None
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def expected_count(retention: Retention, every: int | str | None, length: TrainingLength) -> int:
    """The largest number of checkpoints at one time, including the one being written, if the
    training saves every `every` steps, as `TrainingLength.in_steps` reads them (None: only at the
    end). If all are kept and the number of steps is unknown, or an epoch's where `every` counts
    epochs, it is 2."""
    asked = [each for each in (every, length.eval_every if retention.best else None) if each]
    found = [length.in_steps(each) for each in asked]
    periods = [Fraction(1) if period is None else period for period in found]
    known = length.steps is not None and None not in found
    # Steps after which one may be saved; if unknown, as many as there may be at one time.
    more = (retention.last or 0) + retention.best + 2
    steps = length.steps if known else math.ceil(more * max([Fraction(1), *periods]))
    assert steps is not None
    numbers = {steps}
    for each_of in periods:
        numbers.update(math.ceil(k * each_of) for k in range(1, math.ceil(steps / each_of)))
    if length.saves_first or (retention.best and length.eval_first):
        numbers.add(0)
    saved = sorted(numbers)
    if retention.last is None:
        return len(saved) if known else min(len(saved), 2)
    older = saved[:-1]
    if not retention.best:  # else evaluated ones, saved or not, may be the newest
        older = older[: -retention.last]
    period = retention.every if known else None
    for_good = sum(step % period == 0 for step in older) if period else 0
    return min(retention.last + for_good + retention.best + 1, len(saved))
