"""Micro-batches: samples compared with what their set says of them, laid out as lines, padded, cut.

The loss of a step is divided by the number of targets that `targets` says, before a sample is read:
a wrong number would scale the gradient, and no one would see it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline import NO_TARGET, Data, DataError, MicroBatch, Sample, Samples

PADDING = {"labels": NO_TARGET}
"""Value that fills a per-token column; 0 (False) fills all others, and token ids where no one asks
for another."""
Array = np.ndarray[Any, Any]


def collate(samples: Sequence[Sample], pad_id: int, device: torch.device) -> MicroBatch:
    """Lay samples out in lines, padding short ones on the right with `pad_id` and NO_TARGET. A
    causal model needs no mask for that: no real token attends to it. Without samples, one padding
    token is a filler, with which the rank takes part. Next to packed samples, padding is its own
    document."""
    lines = [line for sample in samples for line in _lines(sample)]
    length = max((len(line["input_ids"]) for line in lines), default=1)
    shape = (max(len(lines), 1), length)
    packed = any("positions" in line for line in lines)
    columns = {name: one for line in lines for name, one in line.items() if name != "positions"}
    columns = columns or {"input_ids": np.zeros(0, np.int64), "labels": np.zeros(0, np.int64)}
    filling = {**PADDING, "input_ids": pad_id}
    tokens: dict[str, Array] = {
        name: np.full((*shape, *one.shape[1:]), filling.get(name, 0), dtype=one.dtype)
        for name, one in columns.items()
    }
    real = tokens["real"] = np.zeros(shape, dtype=np.bool_)
    positions = np.zeros(shape if packed else 0, dtype=np.int64)
    for number, line in enumerate(lines):
        size = len(line["input_ids"])
        real[number, :size] = True
        for name in columns:
            tokens[name][number, :size] = line[name]
        if packed:
            counted = line.get("positions", np.arange(size))
            positions[number] = np.concatenate([counted, np.arange(length - size)])
    if real.all():
        del tokens["real"]
    if packed:
        tokens["positions"] = positions
    batch = MicroBatch(
        tokens=_tensors(tokens),
        rows=_tensors(*(sample.rows for sample in samples)),
        free=_tensors(*(sample.free for sample in samples)),
        # A document ends where positions start again at 0.
        documents=[np.diff(np.flatnonzero(line == 0), append=length).tolist() for line in positions]
        if packed
        else None,
        size=sum(sample.documents for sample in samples),
    )
    # The feed asks for tensors on the CPU, and sends them by itself on a separate stream.
    on_gpu = device.type == "cuda"
    return batch.changed(
        lambda one: (one.pin_memory() if on_gpu else one).to(device, non_blocking=on_gpu)
    )


def _lines(sample: Sample) -> list[dict[str, Array]]:
    """The per-token columns of each line of a sample."""
    ids = {"input_ids": sample.input_ids, "labels": sample.labels}
    columns = {name: np.asarray(one, np.int64) for name, one in ids.items()}
    columns |= {name: np.asarray(one) for name, one in sample.tokens.items()}
    if sample.positions is None:
        return [columns]
    if not sample.apart:
        return [{**columns, "positions": sample.positions}]
    edges = [*np.flatnonzero(sample.positions == 0).tolist(), len(sample.positions)]
    return [
        {name: one[start:end] for name, one in columns.items()}
        for start, end in itertools.pairwise(edges)
    ]


def _tensors(*columns: Mapping[str, Array]) -> dict[str, Tensor]:
    """Columns of several samples, joined."""
    names = dict.fromkeys(itertools.chain.from_iterable(columns))
    return {
        name: torch.from_numpy(np.concatenate([one[name] for one in columns if name in one]))
        for name in names
    }


def padded(batch: MicroBatch, multiple: int) -> MicroBatch:
    """The micro-batch with its length padded on the right to a multiple, as by `pad`."""
    lines, length = batch.input_ids.shape
    longer = -(-length // multiple) * multiple
    return pad(batch, lines, longer, packed=batch.positions is not None)


def pad(batch: MicroBatch, lines: int, length: int, *, packed: bool) -> MicroBatch:
    """The micro-batch padded to shape (`lines`, `length`), with positions if `packed`. Padding has
    no targets; next to packed documents it is a separate document."""
    before, columns = batch.input_ids.shape
    if (before, columns) == (lines, length) and packed == (batch.positions is not None):
        return batch
    given = {"real": torch.ones_like(batch.labels, dtype=torch.bool), **batch.tokens}
    given.pop("positions", None)
    tokens = {
        name: F.pad(
            one,
            (0, 0) * (one.ndim - 2) + (0, length - columns, 0, lines - before),
            value=PADDING.get(name, 0),
        )
        for name, one in given.items()
    }
    if packed:
        count = torch.arange(length, device=batch.input_ids.device)
        tokens["positions"] = positions = count.repeat(lines, 1)
        if batch.positions is not None:
            positions[:before, :columns] = batch.positions
            positions[:before, columns:] = count[: length - columns]
    documents: list[Sequence[int]] | None = None  # not known
    if packed and (batch.positions is None or batch.documents is not None):
        known = batch.documents or [[length]] * before
        more = [length - columns] if batch.positions is not None and length > columns else []
        documents = [*([*line, *more] for line in known), *[[length]] * (lines - before)]
    return replace(batch, tokens=tokens, documents=documents)


def equal_shapes(batches: Sequence[MicroBatch], least: int) -> list[MicroBatch]:
    """The micro-batches, padded to the largest shape among them, and fillers up to `least`."""
    lines = max(batch.input_ids.shape[0] for batch in batches)
    length = max(batch.input_ids.shape[1] for batch in batches)
    packed = any(batch.positions is not None for batch in batches)
    even = [pad(batch, lines, length, packed=packed) for batch in batches]
    return even + [filler_like(even[0])] * (least - len(even))


def filler_like(batch: MicroBatch) -> MicroBatch:
    """A filler of the shape of a micro-batch, with its further arguments of the model."""
    tokens = {**batch.tokens, "labels": torch.full_like(batch.labels, NO_TARGET)}
    return replace(batch, tokens=tokens, rows={}, size=0)


def sequence_slice(batch: MicroBatch, index: int, count: int) -> MicroBatch:
    """Slice `index` of `count` equal ones of the sequence, whose length they divide.

    Per-token tensors have shape (lines, length / count, ...), except `positions`, which are those
    of the whole sequence: the model is given its slice of them (`ContextParallel`), while masks
    follow from all.
    """
    lines, length = batch.input_ids.shape
    size = length // count
    tokens = {
        name: one[:, index * size : (index + 1) * size].contiguous()
        for name, one in batch.tokens.items()
    }
    whole = torch.arange(length, device=batch.input_ids.device).expand(lines, -1)
    tokens["positions"] = whole if batch.positions is None else batch.positions
    one_each = [[length]] * lines
    documents = one_each if batch.positions is None else batch.documents
    return replace(batch, tokens=tokens, documents=documents)


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


def _columns(sample: Sample) -> dict[str, str]:
    """The type of each entry of the sample's own columns, by name."""
    columns = {**sample.tokens, **sample.rows, **sample.free}
    return {name: f"{one.dtype}{[*one.shape[1:]] or ''}" for name, one in columns.items()}
