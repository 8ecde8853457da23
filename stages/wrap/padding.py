"""Padding of micro-batches to the lengths that strategies ask for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pipeline import NO_TARGET, MicroBatch


def padded(batch: MicroBatch, multiple: int) -> MicroBatch:
    """The micro-batch with its length padded on the right to a multiple, as by `pad`."""
    samples, length = batch.input_ids.shape
    longer = -(-length // multiple) * multiple
    return pad(batch, samples, longer, packed=batch.positions is not None)


def pad(batch: MicroBatch, samples: int, length: int, *, packed: bool) -> MicroBatch:
    """The micro-batch padded to shape (`samples`, `length`), with positions if `packed`. Padding
    has no targets; beside packed documents it is a document of its own."""
    rows, columns = batch.input_ids.shape
    if (rows, columns) == (samples, length) and packed == (batch.positions is not None):
        return batch
    place = (0, length - columns, 0, samples - rows)
    positions = None
    if packed:
        count = torch.arange(length, device=batch.input_ids.device)
        positions = count.repeat(samples, 1)
        if batch.positions is not None:
            positions[:rows, :columns] = batch.positions
            positions[:rows, columns:] = count[: length - columns]
    real = torch.ones_like(batch.labels, dtype=torch.bool) if batch.real is None else batch.real
    return MicroBatch(
        input_ids=F.pad(batch.input_ids, place),
        labels=F.pad(batch.labels, place, value=NO_TARGET),
        positions=positions,
        real=F.pad(real, place, value=False),
        documents=_padded_documents(batch, samples, length) if packed else None,
    )


def _padded_documents(
    batch: MicroBatch, samples: int, length: int
) -> Sequence[Sequence[int]] | None:
    """Lengths of documents once the micro-batch is padded; None if they are not known."""
    rows, columns = batch.input_ids.shape
    if batch.positions is not None and batch.documents is None:
        return None
    known = batch.documents or [[length]] * rows
    more = [length - columns] if batch.positions is not None and length > columns else []
    return [*([*row, *more] for row in known), *[[length]] * (samples - rows)]
