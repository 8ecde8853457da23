"""Samples of a data slot, read and compared with what it promises of them.

The loss of a step is divided by the number of targets that `targets` says, before a sample is read:
a wrong number would scale the gradient, and nobody would see it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline import NO_TARGET, DataError, MicroBatch, Sample, Samples


def read(samples: Samples, indices: Sequence[int]) -> list[Sample]:
    """Return samples. Raises DataError for one that is none, whose parts differ in length, or that
    has another number of targets than the set says."""
    found = [samples[index] for index in indices]
    for index, sample in zip(indices, found, strict=True):
        if not isinstance(sample, Sample):
            raise _error(
                samples,
                f"sample {index} is a {type(sample).__name__}",
                hint="`__getitem__` returns a Sample(input_ids=..., labels=...)",
            )
        size, labels = len(sample.input_ids), len(sample.labels)
        if labels != size:
            raise _error(samples, f"sample {index}: {size} input_ids, {labels} labels")
        if sample.positions is not None and len(sample.positions) != size:
            given = len(sample.positions)
            raise _error(samples, f"sample {index}: {size} input_ids, {given} positions")
    if found:
        _require_targets(samples, indices, found)
    return found


def _require_targets(samples: Samples, indices: Sequence[int], found: Sequence[Sample]) -> None:
    counted = [int(np.count_nonzero(np.asarray(one.labels) != NO_TARGET)) for one in found]
    whole, said = sum(counted), samples.total_targets(np.array(indices, np.int64))
    if whole == said:
        return
    for index, own in zip(indices, counted, strict=True):
        if own != samples.targets(index):
            have = f"sample {index} has {own} targets"
            raise _error(samples, f"{have}, and targets({index}) says {samples.targets(index)}")
    have = f"{len(indices)} samples have {whole} targets"
    raise _error(samples, f"{have}, and total_targets says {said}")


def require_known(
    samples: Samples, indices: Sequence[int], batch: MicroBatch, vocabulary: int
) -> None:
    """Raise DataError for a token of a micro-batch of the host that the model has no row for."""
    ids, labels = batch.input_ids.numpy(), batch.labels.numpy()
    if ids.min() >= 0 and max(ids.max(), labels.max()) < vocabulary:
        return
    for index, row, targets in zip(indices, ids, labels, strict=False):
        odd = [*row[(row < 0) | (row >= vocabulary)], *targets[targets >= vocabulary]]
        if odd:
            message = f"sample {index} has token {odd[0]}; the model embeds {vocabulary}"
            raise _error(samples, message)


def _error(samples: Samples, message: str, *, hint: str = "") -> DataError:
    kind = type(samples)
    return DataError(message, file=f"{kind.__module__}:{kind.__qualname__}", hint=hint)
