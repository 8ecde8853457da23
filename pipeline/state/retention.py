"""Which checkpoints to keep."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel

from pipeline.errors import CheckpointError
from pipeline.state.manifest import FILE, Manifest
from pipeline.state.store import Store, step_number


class Retention(BaseModel):
    """A checkpoint is kept if any of these says so; without `last`, all are."""

    last: int | None = None
    """The newest so many."""
    every: int | None = None
    """Those whose step is a multiple."""
    best: int = 0
    """Those with the lowest held-out loss, so many."""


def forget(store: Store, retention: Retention) -> Iterator[str]:
    """Delete what need not be kept; call after a commit. Yields what could not be deleted."""
    if retention.last is None:
        return
    names = list(store.names())
    old = names[: -retention.last]
    best = best_of(store, names, retention.best) if retention.best and old else set()
    for name in old:
        step = step_number(name) or 0
        if name in best or (retention.every and step % retention.every == 0):
            continue
        try:
            store.delete(name)
        except OSError as error:
            yield f"{store.locate(name)} cannot be deleted: {error.strerror or error}"


def best_of(store: Store, names: Sequence[str], count: int) -> set[str]:
    """The `count` checkpoints with the lowest loss on held-out data; fewer, where that is not
    known."""
    losses = {name: _stored_loss(store, name) for name in names}
    ranked = sorted((loss, name) for name, loss in losses.items() if loss is not None)
    return {name for _, name in ranked[:count]}


def heldout_loss(manifest: Manifest) -> float | None:
    """The held-out loss of the checkpoint's weights; None where that is not known."""
    metrics = manifest.progress.get("metrics")
    loss = metrics.get("eval_loss") if isinstance(metrics, Mapping) else None
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def _stored_loss(store: Store, name: str) -> float | None:
    """None for a checkpoint that cannot be read, too."""
    try:
        return heldout_loss(Manifest.load(store.get(name, FILE), name))
    except (OSError, CheckpointError):
        return None
