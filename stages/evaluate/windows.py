"""A text longer than a model reads at once, in overlapping windows that score every token once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pipeline.artifacts import NO_TARGET, Sample


def windows(ids: Sequence[int], window: int, stride: int) -> Iterator[Sample]:
    """The windows of a document, `stride` apart, each of at most `window` input tokens.

    A window's labels are the tokens that no earlier one has; the others are its context. So each
    token but the first is a label exactly once, and every one beyond the first window has at least
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
