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

RESERVED_COLUMNS = ("input_ids", "labels", "positions", "real")
"""Per-token columns of a micro-batch that a sample's own may not be called."""
Mistake = tuple[str, str]
"""A message, and a hint."""


def micro_batch(
    data: Data, samples: Samples, indices: Sequence[int], first: int, device: torch.device,
    vocabulary: int | None = None,
) -> tuple[MicroBatch, list[int]]:  # fmt: skip
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
    if mistake := next(_mistakes(data, samples, indices, found, vocabulary), None):
        kind, (message, hint) = type(samples), mistake
        raise DataError(message, file=f"{kind.__module__}:{kind.__qualname__}", hint=hint)
    return found


def _mistakes(
    data: Data, samples: Samples, indices: Sequence[int], found: Sequence[Any],
    vocabulary: int | None,
) -> Iterator[Mistake]:  # fmt: skip
    """Ways in which the samples found at `indices` are not as their set says."""
    if not found:
        return
    first = _columns(found[0]) if isinstance(found[0], Sample) else {}
    for index, sample in zip(indices, found, strict=True):
        if not isinstance(sample, Sample):
            hint = "`__getitem__` returns a Sample(input_ids=..., labels=...)"
            yield f"sample {index} is a {type(sample).__name__}", hint
        yield from _of_tokens(data, index, sample)
        rows = sample.documents
        for name, one in sample.rows.items():
            if len(one) != rows:
                yield f"sample {index}: {rows} rows, {len(one)} {name}", ""
        if rows % data.group:
            yield f"sample {index}: {rows} rows in groups of {data.group}", ""
        if (columns := _columns(sample)) != first:
            message = f"sample {index} has columns {columns}, sample {indices[0]} has {first}"
            yield message, "all samples have the same columns, of the same types"
    yield from _of_counts(samples, indices, found)
    if vocabulary is None:
        return
    for index, sample in zip(indices, found, strict=True):
        ids, labels = sample.input_ids, sample.labels
        odd = [*ids[(ids < 0) | (ids >= vocabulary)], *labels[labels >= vocabulary]]
        if odd:
            yield f"sample {index} has token {odd[0]}; the model embeds {vocabulary}", ""


def _of_counts(
    samples: Samples, indices: Sequence[int], found: Sequence[Sample]
) -> Iterator[Mistake]:
    """Numbers of targets or of rows that the samples do not have."""
    counted = [int(np.count_nonzero(np.asarray(one.labels) != NO_TARGET)) for one in found]
    whole, said = sum(counted), samples.total_targets(np.array(indices, np.int64))
    if whole != said:
        for index, count in zip(indices, counted, strict=True):
            if count != (one := samples.targets(index)):
                yield f"sample {index} has {count} targets, and targets({index}) says {one}", ""
        yield f"{len(indices)} samples have {whole} targets, and total_targets says {said}", ""
    if type(samples).total_rows is not Samples.total_rows:  # which reads them
        rows, said = sum(one.documents for one in found), samples.total_rows(np.array(indices))
        if rows != said:
            hint = "define total_rows: the number of documents of samples, known without reading"
            have = f"samples {[*indices]} have {rows} documents, and total_rows says {said}"
            yield have, f"{hint} them"


def _of_tokens(data: Data, index: int, sample: Sample) -> Iterator[Mistake]:
    """Columns that have not an entry for each token, labels that are not tokens, positions that are
    not of whole documents, and names that are taken."""
    labels, places = np.asarray(sample.labels), sample.positions
    given = {"labels": labels, **({} if places is None else {"positions": places}), **sample.tokens}
    for name, column in given.items():
        if len(column) != len(sample.input_ids):
            yield f"sample {index}: {len(sample.input_ids)} input_ids, {len(column)} {name}", ""
    if odd := labels[(labels < 0) & (labels != NO_TARGET)].tolist():
        hint = f"{NO_TARGET} is the label of a position that is not trained on"
        yield f"sample {index} has label {odd[0]}", hint
    if places is not None:
        if sample.documents > 1 and not sample.apart and not data.packed:
            hint = "set packed=True in its Data: the model is then tested before it trains"
            yield f"sample {index} has several documents in one line", hint
        places = np.asarray(places)
        if places[:1].any() or ((places[1:] != 0) & (np.diff(places) != 1)).any():
            begin = f"[{', '.join(map(str, places[:8]))}{', ...' * (len(places) > 8)}]"
            hint = "positions count the tokens of each document from 0"
            yield f"sample {index} has positions {begin}", hint
    for name in RESERVED_COLUMNS:
        if name in sample.tokens:
            message = f"sample {index} has a further column {name!r}, a name that is taken"
            yield message, "give it another name"


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
    columns = {**sample.tokens, **sample.rows, **sample.free}
    return {name: f"{one.dtype}{[*one.shape[1:]] or ''}" for name, one in columns.items()}
