"""Perplexity of a model on documents."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline import NO_TARGET, Sample, StageError
from stages.train.batches import collate
from stages.train.loss import SummedLoss

if TYPE_CHECKING:
    from stages.evaluate.lm import EvaluateLm


def measure(
    config: EvaluateLm,
    model: Any,
    documents: Iterable[str],
    encode: Callable[[str], list[int]],
    window: int,
    most: int | None,
) -> dict[str, Any]:
    """Score the documents, `batch_size` windows at a time, and no more than `most` windows of all
    of them; the results as JSON. Raises StageError if nothing was scored, or the model returns NaN
    or infinity."""
    totals, nats = Counter[str](), 0.0
    stride = min(config.stride or window // 2, window)

    def samples() -> Iterator[Sample]:
        for document in documents:
            totals["documents"] += 1
            totals["bytes"] += len(document.encode())
            yield from windows(encode(document), window, stride)

    left = itertools.islice(samples(), most)
    loss = SummedLoss(model)
    device = model.get_input_embeddings().weight.device
    while batch := list(itertools.islice(left, config.batch_size)):
        with torch.no_grad():
            nats += float(loss(collate(batch, 0, device)))
        totals["tokens"] += sum(int((sample.labels != NO_TARGET).sum()) for sample in batch)
    if not totals["tokens"]:
        raise StageError("no document has two tokens", hint="set prepend_bos: true")
    mean = nats / totals["tokens"]
    if not math.isfinite(mean):
        raise StageError(f"the model's mean loss is {mean}")
    results = {
        "perplexity": math.exp(mean) if mean < math.log(1e300) else None,
        "loss": mean,
        "tokens": totals["tokens"],
        "documents": totals["documents"],
    }
    if config.prepend_bos and most is None:
        results["bits_per_byte"] = nats / math.log(2) / totals["bytes"]
    return results


def windows(ids: Sequence[int], window: int, stride: int) -> Iterator[Sample]:
    """The windows of a document, `stride` apart, each of at most `window` input tokens.

    A window's labels are the tokens that no earlier window has. So each token but the first is a
    label once, and a token beyond the first window has at least `window - stride` before it.
    """
    tokens = np.asarray(ids, dtype=np.int64)
    scored = 0
    for start in range(0, max(len(tokens) - 1, 0), stride):
        stop = min(start + window, len(tokens) - 1)
        labels = tokens[start + 1 : stop + 1].copy()
        labels[: scored - start] = NO_TARGET
        yield Sample(input_ids=tokens[start:stop], labels=labels)
        scored = stop
        if stop == len(tokens) - 1:
            return
