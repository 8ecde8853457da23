"""Check before the first step that no packed document sees another one of its line."""

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
    single, after, after_other = (_loss(engine, data, second, one) for one in (None, first, other))
    what = "a document sees the one before it in the same sample"
    _require_close(what, after_other, after, LEAK)
    what = "a document's loss in a packed sample differs from its loss in its own sample"
    dtypes = engine.describe().get("compute", ["fp32"])
    _require_close(what, after, single, max(TOLERANCE.get(name, 1e-4) for name in dtypes))


def _two_documents(samples: Iterable[Sample]) -> tuple[Sample, Sample] | None:
    """Beginnings of two documents that follow each other; the second has targets."""
    for sample in itertools.islice(samples, SEARCHED):
        if sample.positions is None:
            continue
        starts = [*np.flatnonzero(sample.positions == 0).tolist(), len(sample.input_ids)]
        parts = [slice(a, min(b, a + LONGEST)) for a, b in itertools.pairwise(starts)]
        documents = [Sample(input_ids=sample.input_ids[one], labels=sample.labels[one])
                     for one in parts]  # fmt: skip
        for first, second in itertools.pairwise(documents):
            if (second.labels != NO_TARGET).any():
                return first, second
    return None


def _loss(engine: Engine, data: Data, sample: Sample, before: Sample | None) -> float:
    """Cross-entropy of a document, packed after the one `before` it, without dropout: the mean of
    copies, two in a micro-batch of each data-parallel rank. With one, some attention finds packed
    documents that it misses in more."""
    if before is not None:
        lengths = len(before.input_ids), len(sample.input_ids)
        sample = Sample(
            input_ids=np.concatenate([before.input_ids, sample.input_ids]),
            labels=np.concatenate([np.full(lengths[0], NO_TARGET), sample.labels]),
            positions=np.concatenate([np.arange(length) for length in lengths]),
        )
    batch = collate([sample, sample], data.pad_id, engine.device)
    (rows,) = engine.evaluate([batch], RowLoss())
    part = torch.zeros((), device=engine.device) if rows is None else rows[:, 0].sum()
    return float(engine.total(part)) / (2 * engine.data_axis.count)


def _require_close(what: str, found: float, expected: float, tolerance: float) -> None:
    if not abs(found - expected) <= tolerance * max(abs(expected), 1.0):
        raise StageError(f"packing: {what}: {found:.6g} instead of {expected:.6g}", hint=HINT)
