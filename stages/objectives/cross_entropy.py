"""Next-token prediction: the cross-entropy of all target tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from pipeline import NO_TARGET, LossParts, MicroBatch, ScoreRequest, Scores, Unit


class CrossEntropy:
    """Objective: the cross-entropy in nats, and the loss of a mixture of experts' router.

    The router's loss is a mean over the micro-batch's tokens, so it counts once for each of its
    target tokens.
    """

    units: Sequence[Unit] = ("targets",)
    metrics: Mapping[str, Unit] = {}

    def __init__(
        self, chunk: int | None = None, *, compiled_by: str | None = None,
        router: float | Literal["config"] | None = None,
    ) -> None:  # fmt: skip
        self.request = ScoreRequest(total=True, chunk=chunk, compiled_by=compiled_by, router=router)

    def __call__(self, scores: Scores, batch: MicroBatch) -> LossParts:
        loss = -scores.total
        if self.request.router is not None:
            loss = loss + scores.router * (batch.labels != NO_TARGET).sum()
        return LossParts(terms={"targets": loss})


class RowLoss:
    """Measure: the cross-entropy of each row, in nats."""

    width = 1

    def __init__(self, chunk: int | None = None, *, compiled_by: str | None = None) -> None:
        self.request = ScoreRequest(tokens=True, chunk=chunk, compiled_by=compiled_by)

    def __call__(self, scores: Scores, batch: MicroBatch) -> Tensor:
        return -batch.sum_rows(scores.tokens)[:, None]
