"""Perplexity of a model on documents."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.contracts.data import NO_TARGET, Sample
from pipeline.errors import StageError
from stages.train.batches import collate
from stages.train.loss import SummedLoss

if TYPE_CHECKING:
    from stages.evaluate.lm import EvaluateLm


@dataclass
class Totals:
    """Sums over the documents scored so far."""

    documents: int = 0
    tokens: int = 0
    """Number of scored tokens."""
    bytes: int = 0
    """Bytes of the documents' text in UTF-8."""
    nats: float = 0.0
    """Sum of -log p over scored tokens."""

    def results(self, *, bytes_are_scored: bool) -> dict[str, Any]:
        """The results, as JSON. Raises StageError if nothing was scored, or the model returns NaN
        or infinity."""
        if not self.tokens:
            raise StageError("no document has two tokens", hint="set prepend_bos: true")
        mean = self.nats / self.tokens
        if not math.isfinite(mean):
            raise StageError(f"the model's mean loss is {mean}")
        facts: dict[str, Any] = {
            "perplexity": math.exp(mean) if mean < math.log(1e300) else None,
            "loss": mean,
            "tokens": self.tokens,
            "documents": self.documents,
        }
        if bytes_are_scored:
            facts["bits_per_byte"] = self.nats / math.log(2) / self.bytes
        return facts


def measure(
    config: EvaluateLm,
    model: Any,
    documents: Iterable[str],
    encode: Callable[[str], list[int]],
    *,
    most: int | None = None,
) -> Totals:
    """Score the documents, `batch_size` windows at a time, and no more than `most` windows of all
    of them. The config's `window` is set."""
    totals = Totals()
    samples = itertools.islice(_samples(config, documents, encode, totals), most)
    loss = SummedLoss(model)
    device = model.get_input_embeddings().weight.device
    while batch := list(itertools.islice(samples, config.batch_size)):
        with torch.no_grad():
            totals.nats += float(loss(collate(batch, 0, device)))
        totals.tokens += sum(int((sample.labels != NO_TARGET).sum()) for sample in batch)
    return totals


def _samples(
    config: EvaluateLm, documents: Iterable[str], encode: Callable[[str], list[int]], totals: Totals
) -> Iterator[Sample]:
    assert config.window is not None
    stride = min(config.stride or config.window // 2, config.window)
    for document in documents:
        totals.documents += 1
        totals.bytes += len(document.encode())
        yield from windows(encode(document), config.window, stride)


def windows(ids: Sequence[int], window: int, stride: int) -> Iterator[Sample]:
    """The windows of a document, `stride` apart, each of at most `window` input tokens.

    A window's labels are the tokens that no earlier window has; the others are its context. So each
    token but the first is a label exactly once, and a token beyond the first window has at least
    `window - stride` tokens before it.
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
