"""Before the first step: does this model, as it runs here, compute what the recipe's savings take
for granted?"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from pipeline.contracts.data import NO_TARGET, Data, Sample
from pipeline.contracts.engine import Engine
from pipeline.errors import StageError
from stages.train.batches import collate
from stages.train.loss import SummedLoss

LOOKED_AT = 256
"""Samples among which one that can be used is looked for."""
LONGEST = 128
"""Tokens of each document, or sample, that are used."""
LEAK = 1e-5
"""Relative change of a document's loss, when the one before it changes, that is rounding."""
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
"""Relative difference of losses that other kernels and other lengths make, by compute dtype."""
HINTS = {
    "packing": "set packing: false, or another `attention` in the model slot",
    "loss_chunk_size": "leave out loss_chunk_size",
}


def prove_packing(engine: Engine, data: Data, samples: Iterable[Sample], loss: SummedLoss) -> None:
    """A document's loss behind another one is what it is alone (collective). Nothing to do when
    none of the first `samples` is packed. Raises StageError."""
    documents = _two_documents(samples) if data.packed else None
    if documents is None:
        return
    first, second = documents
    alone = _loss(engine, data, loss, [second])
    behind = _loss(engine, data, loss, [_packed(first, second)])
    other = _loss(engine, data, loss, [_packed(_filled(first, data.pad_id), second)])
    _require_close("packing: a document sees the one before it in the same sample",
                   other, behind, LEAK)  # fmt: skip
    _require_close("packing: a document's loss in a packed sample is not its loss alone",
                   behind, alone, _tolerance(engine))  # fmt: skip


def prove_head(engine: Engine, data: Data, samples: Iterable[Sample], loss: SummedLoss) -> None:
    """The loss in chunks is that of all logits at once (collective). Nothing to do when none of the
    first `samples` has a target. Raises StageError."""
    sample = _with_target(samples)
    if sample is None:
        return
    batch = collate([sample], data.pad_id, engine.device)
    with _measuring(engine):
        whole, chunked = float(loss.in_full(batch)), float(loss(batch))
    _require_close("loss_chunk_size: the loss in chunks is not that of all logits",
                   chunked, whole, _tolerance(engine))  # fmt: skip


def _with_target(samples: Iterable[Sample]) -> Sample | None:
    """The tokens around a sample's first target."""
    for sample in itertools.islice(samples, LOOKED_AT):
        targets = np.flatnonzero(sample.labels != NO_TARGET)
        if targets.size:
            start = max(int(targets[0]) - LONGEST // 2, 0)
            return _part(sample, start, start + LONGEST)
    return None


def _two_documents(samples: Iterable[Sample]) -> tuple[Sample, Sample] | None:
    """The first two of a sample, the second with targets, both cut."""
    for sample in itertools.islice(samples, LOOKED_AT):
        if sample.positions is None:
            continue
        starts = [*np.flatnonzero(sample.positions == 0).tolist(), len(sample.input_ids)]
        for begin, middle, end in zip(starts, starts[1:], starts[2:], strict=False):
            first, second = _cut(_part(sample, begin, middle)), _cut(_part(sample, middle, end))
            if (second.labels != NO_TARGET).any():
                return first, second
    return None


def _part(sample: Sample, start: int, stop: int) -> Sample:
    return Sample(input_ids=sample.input_ids[start:stop], labels=sample.labels[start:stop])


def _cut(sample: Sample) -> Sample:
    return _part(sample, 0, LONGEST)


def _packed(first: Sample, second: Sample) -> Sample:
    """Both in one sample, with the targets of the second."""
    lengths = len(first.input_ids), len(second.input_ids)
    return Sample(
        input_ids=np.concatenate([first.input_ids, second.input_ids]),
        labels=np.concatenate([np.full(lengths[0], NO_TARGET), second.labels]),
        positions=np.concatenate([np.arange(length) for length in lengths]),
    )


def _loss(engine: Engine, data: Data, loss: SummedLoss, samples: list[Sample]) -> float:
    batch = collate(samples, data.pad_id, engine.device)
    with _measuring(engine):
        return float(loss(batch))


@contextlib.contextmanager
def _measuring(engine: Engine) -> Iterator[None]:
    """Without gradients and dropout."""
    engine.model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        engine.model.train()


def _tolerance(engine: Engine) -> float:
    computed_in = engine.describe().get("compute", ["fp32"])
    return max(TOLERANCE.get(name, 0.0) for name in computed_in) or TOLERANCE["fp32"]


def _require_close(what: str, found: float, expected: float, tolerance: float) -> None:
    if not abs(found - expected) <= tolerance * max(abs(expected), 1.0):
        raise StageError(
            f"{what}: {found:.6g} instead of {expected:.6g}",
            hint=HINTS[what.partition(":")[0]],
        )


def _filled(sample: Sample, token: int) -> Sample:
    """A sample of the same length with other tokens."""
    return Sample(input_ids=np.full_like(sample.input_ids, token), labels=sample.labels)
