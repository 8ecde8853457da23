"""Check before the first step that this model keeps packed documents apart."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import torch

from pipeline import NO_TARGET, Data, Engine, Sample, StageError
from stages.batches.layout import collate
from stages.objectives.cross_entropy import RowLoss

SEARCHED = 256
"""Samples that are searched for a usable one."""
LONGEST = 128
"""Tokens of each document that are used."""
LEAK = 1e-5
"""Relative change of a document's loss from rounding, when the document before it changes."""
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
"""Relative difference of losses from other kernels and other lengths, by compute dtype."""
HINT = "set packing: false, or another `attention` in the model slot"


def verify_packing(engine: Engine, data: Data, samples: Iterable[Sample]) -> None:
    """Raise StageError if the loss of a document depends on the one before it (collective).
    Does nothing if none of the first `samples` is packed."""
    documents = _two_documents(samples) if data.packed else None
    if documents is None:
        return
    first, second = documents
    other = Sample(input_ids=np.full_like(first.input_ids, data.pad_id), labels=first.labels)
    own = _loss(engine, data, second)
    after = _loss(engine, data, _packed(first, second))
    after_other = _loss(engine, data, _packed(other, second))
    what = "a document sees the one before it in the same sample"
    _require_close(what, after_other, after, LEAK)
    what = "a document's loss in a packed sample differs from its loss in its own sample"
    dtypes = engine.describe().get("compute", ["fp32"])
    _require_close(what, after, own, max(TOLERANCE.get(name, 1e-4) for name in dtypes))


def _two_documents(samples: Iterable[Sample]) -> tuple[Sample, Sample] | None:
    """Beginnings of two documents that follow each other; the second has targets."""
    for sample in itertools.islice(samples, SEARCHED):
        if sample.positions is None:
            continue
        starts = [*np.flatnonzero(sample.positions == 0).tolist(), len(sample.input_ids)]
        for begin, middle, end in zip(starts, starts[1:], starts[2:], strict=False):
            first, second = _part(sample, begin, middle), _part(sample, middle, end)
            if (second.labels != NO_TARGET).any():
                return first, second
    return None


def _part(sample: Sample, start: int, stop: int) -> Sample:
    """The first LONGEST tokens of [start, stop)."""
    chosen = slice(start, min(stop, start + LONGEST))
    return Sample(input_ids=sample.input_ids[chosen], labels=sample.labels[chosen])


def _packed(first: Sample, second: Sample) -> Sample:
    """Both documents in one sample, with the targets of the second."""
    lengths = len(first.input_ids), len(second.input_ids)
    return Sample(
        input_ids=np.concatenate([first.input_ids, second.input_ids]),
        labels=np.concatenate([np.full(lengths[0], NO_TARGET), second.labels]),
        positions=np.concatenate([np.arange(length) for length in lengths]),
    )


def _loss(engine: Engine, data: Data, sample: Sample) -> float:
    """Cross-entropy of a sample, without dropout: the mean of copies, two in a micro-batch of each
    data-parallel rank. With one, some attention finds packed documents that it misses in more."""
    batch = collate([sample, sample], data.pad_id, engine.device)
    (rows,) = engine.evaluate([batch], RowLoss())
    own = torch.zeros((), device=engine.device) if rows is None else rows[:, 0].sum()
    return float(engine.total(own)) / (2 * engine.data_axis.count)


def _require_close(what: str, found: float, expected: float, tolerance: float) -> None:
    if not abs(found - expected) <= tolerance * max(abs(expected), 1.0):
        raise StageError(f"packing: {what}: {found:.6g} instead of {expected:.6g}", hint=HINT)
