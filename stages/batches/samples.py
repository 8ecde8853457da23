"""Samples of a data slot in micro-batches, compared with what the slot promises of them.

The loss of a step is divided by the number of targets that `targets` says, before a sample is read:
a wrong number would scale the gradient, and no one would see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline import NO_TARGET, Data, DataError, MicroBatch, Sample, Samples, Unit
from stages.batches.layout import collate, filler_like

TAKEN = ("input_ids", "labels", "positions", "real")
"""Per-token columns of a micro-batch that a sample's own may not be called."""


def micro_batch(
    data: Data,
    samples: Samples,
    indices: Sequence[int],
    first: int,
    device: torch.device,
    vocabulary: int | None = None,
) -> tuple[MicroBatch, list[int]]:
    """The samples at `indices` in one micro-batch, and their lengths. Without any, a filler: with
    the further arguments of the model that sample `first` has, so that all ranks run the same parts
    of the model. Raises DataError as `read`."""
    found = read(data, samples, indices, vocabulary)
    if not found:
        (like,) = read(data, samples, [first], vocabulary)
        if like.free:
            return filler_like(collate([like], data.pad_id, device)), []
    return collate(found, data.pad_id, device), [len(sample.input_ids) for sample in found]


def read(
    data: Data, samples: Samples, indices: Sequence[int], vocabulary: int | None = None
) -> list[Sample]:
    """Return samples of one of the data's sets. Raises DataError for one that is none, whose parts
    differ in length, whose positions are not of whole documents, whose columns are not the others',
    that has another number of targets or rows than the set says, or a token outside of the
    `vocabulary`."""
    found = [samples[index] for index in indices]
    first = _columns(found[0]) if found and isinstance(found[0], Sample) else {}
    for index, sample in zip(indices, found, strict=True):
        if not isinstance(sample, Sample):
            raise _error(
                samples,
                f"sample {index} is a {type(sample).__name__}",
                hint="`__getitem__` returns a Sample(input_ids=..., labels=...)",
            )
        size, rows = len(sample.input_ids), sample.documents
        for name, one in _per_token(data, samples, index, sample):
            if len(one) != size:
                raise _error(samples, f"sample {index}: {size} input_ids, {len(one)} {name}")
        for name, one in sample.rows.items():
            if len(one) != rows:
                raise _error(samples, f"sample {index}: {rows} rows, {len(one)} {name}")
        if rows % data.group:
            raise _error(samples, f"sample {index}: {rows} rows in groups of {data.group}")
        if (columns := _columns(sample)) != first:
            raise _error(
                samples,
                f"sample {index} has columns {columns}, sample {indices[0]} has {first}",
                hint="all samples have the same columns, of the same types",
            )
    if found:
        _require_targets(samples, indices, found)
        _require_rows(samples, indices, found)
    if vocabulary is not None:
        _require_known(samples, indices, found, vocabulary)
    return found


def _per_token(
    data: Data, samples: Samples, index: int, sample: Sample
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Columns with an entry for each token, other than ids. Raises DataError for labels that are
    not tokens, positions that are not of whole documents, and names that are taken."""
    labels = np.asarray(sample.labels)
    yield "labels", labels
    if odd := labels[(labels < 0) & (labels != NO_TARGET)].tolist():
        hint = f"{NO_TARGET} is the label of a position that is not trained on"
        raise _error(samples, f"sample {index} has label {odd[0]}", hint=hint)
    if sample.positions is not None:
        places = np.asarray(sample.positions)
        yield "positions", places
        if sample.documents > 1 and not sample.apart and not data.packed:
            hint = "set packed=True in its Data: the model is then tested before it trains"
            raise _error(samples, f"sample {index} has several documents in one line", hint=hint)
        steps = np.diff(places)
        if places[:1].any() or ((places[1:] != 0) & (steps != 1)).any():
            hint = "positions count the tokens of each document from 0"
            raise _error(samples, f"sample {index} has positions {_begin(places)}", hint=hint)
    for name, column in sample.tokens.items():
        if name in TAKEN:
            message = f"sample {index} has a further column {name!r}, a name that is taken"
            raise _error(samples, message, hint="give it another name")
        yield name, column


def _begin(values: NDArray[Any]) -> str:
    """The first of them, as in `[3, 4, 5, ...]`."""
    return f"[{', '.join(map(str, values[:8]))}{', ...' * (len(values) > 8)}]"


def count_units(
    data: Data, samples: Samples, indices: NDArray[np.int64], units: Iterable[Unit]
) -> dict[Unit, int]:
    """Number of target tokens, and of other units, in samples, which may repeat."""
    found: dict[Unit, int] = {"targets": samples.total_targets(indices)}
    if {"rows", "groups"} & {*units}:
        found["rows"] = samples.total_rows(indices)
        found["groups"] = found["rows"] // data.group
    return found


def _columns(sample: Sample) -> dict[str, str]:
    """The type of each entry of the sample's own columns, by name."""
    sorts = (sample.tokens, sample.rows, sample.free)
    return {
        name: f"{one.dtype}{[*one.shape[1:]] or ''}"
        for columns in sorts
        for name, one in columns.items()
    }


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


def _require_rows(samples: Samples, indices: Sequence[int], found: Sequence[Sample]) -> None:
    if type(samples).total_rows is Samples.total_rows:
        return  # which reads them
    rows, said = sum(one.documents for one in found), samples.total_rows(np.array(indices))
    if rows != said:
        have = f"samples {[*indices]} have {rows} documents, and total_rows says {said}"
        hint = "define total_rows: the number of documents of samples, known without reading them"
        raise _error(samples, have, hint=hint)


def _require_known(
    samples: Samples, indices: Sequence[int], found: Sequence[Sample], vocabulary: int
) -> None:
    """Raise DataError for a token of a sample that the model has no row for."""
    for index, one in zip(indices, found, strict=True):
        ids, labels = one.input_ids, one.labels
        odd = [*ids[(ids < 0) | (ids >= vocabulary)], *labels[labels >= vocabulary]]
        if odd:
            message = f"sample {index} has token {odd[0]}; the model embeds {vocabulary}"
            raise _error(samples, message)


def _error(samples: Samples, message: str, *, hint: str = "") -> DataError:
    kind = type(samples)
    return DataError(message, file=f"{kind.__module__}:{kind.__qualname__}", hint=hint)
