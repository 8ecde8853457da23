"""The layout of micro-batches: samples as lines, padding, slices of the sequence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline import NO_TARGET, MicroBatch, Sample

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
