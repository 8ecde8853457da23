"""The cross-entropy as an objective, and what an engine does with a micro-batch and any objective,
whatever divides its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from pipeline import (
    NO_TARGET,
    LossParts,
    Measure,
    MicroBatch,
    Objective,
    Scorer,
    ScoreRequest,
    Scores,
    StageError,
    Unit,
)


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


def judged(
    objective: Objective, scorer: Scorer, own: MicroBatch, whole: MicroBatch, **inputs: Tensor
) -> LossParts:
    """Run the model on a micro-batch, and judge its scores. A filler adds 0 to each sum."""
    asked = objective.request
    if whole.filler:
        nothing = _nothing(asked, scorer, own, whole, **inputs)
        return LossParts(terms=dict.fromkeys(objective.units, nothing))
    return objective(scorer(own, whole, asked, **inputs), whole)


def measured(
    measure: Measure, scorer: Scorer, own: MicroBatch, whole: MicroBatch, **inputs: Tensor
) -> Tensor:
    """Run the model on a micro-batch, and measure its rows; shape (rows, width)."""
    asked = measure.request
    if whole.filler:
        nothing = _nothing(asked, scorer, own, whole, **inputs)
        return nothing.new_zeros(0, measure.width)
    return measure(scorer(own, whole, asked, **inputs), whole)


def _nothing(
    asked: ScoreRequest, scorer: Scorer, own: MicroBatch, whole: MicroBatch, **inputs: Tensor
) -> Tensor:
    """Run the model on a filler; returns 0, with gradients of 0 for all that it computed."""
    chunk, by, values = asked.chunk, asked.compiled_by, asked.values
    least = ScoreRequest(total=not values, values=values, chunk=chunk, compiled_by=by)
    scores = scorer(own, whole, least, **inputs)
    return scores.values.sum() * 0.0 if values else scores.total


class StepSums:
    """Sums over the micro-batches of a step on this rank."""

    def __init__(
        self, objective: Objective, device: torch.device, counts: Mapping[Unit, float], *,
        factor: float,
    ) -> None:  # fmt: skip
        """The loss's terms are divided by `counts` and multiplied by `factor`."""
        self._objective = objective
        zero = torch.zeros((), device=device)
        self._terms: dict[Unit, Tensor] = dict.fromkeys(objective.units, zero)
        self._sums = dict.fromkeys(objective.metrics, zero)
        self._scales = {unit: factor / counts[unit] for unit in objective.units}

    def judge(self, scorer: Scorer, own: MicroBatch, whole: MicroBatch, **inputs: Tensor) -> Tensor:
        """Run the model on a micro-batch and add its sums; returns its share of the loss, to run
        backward from. Raises StageError for sums that the objective does not declare."""
        parts = judged(self._objective, scorer, own, whole, **inputs)
        if {*parts.terms} != {*self._terms} or {*parts.sums} - {*self._sums}:
            raise StageError(
                f"an objective returned the terms {sorted(parts.terms)} and the sums "
                f"{sorted(parts.sums)}, and declares {sorted(self._terms)} and "
                f"{sorted(self._sums)}",
                hint="`units` names the terms, `metrics` the sums",
            )
        for name, value in (*parts.terms.items(), *parts.sums.items()):
            if value.ndim:
                shape = f"has shape {tuple(value.shape)}: a sum over rows is a scalar"
                raise StageError(f"an objective's {name} {shape}")
        # In fp32, to which ranks without rows add their zeros.
        terms = {unit: term.float() for unit, term in parts.terms.items()}
        for unit, term in terms.items():
            self._terms[unit] = self._terms[unit] + term.detach()
        for name, value in parts.sums.items():
            self._sums[name] = self._sums[name] + value.float().detach()
        # Only what is run backward from is divided, and multiplied by `factor`, since the strategy
        # averages gradients; `part` has the plain sums.
        first, *more = (term * self._scales[unit] for unit, term in terms.items())
        return sum(more, first)

    def part(self, *, counted: bool) -> LossParts:
        """This rank's part of each sum: all, or 0 where another rank counts them."""
        if counted:
            return LossParts(terms=self._terms, sums=self._sums)
        return LossParts(
            terms={unit: torch.zeros_like(term) for unit, term in self._terms.items()},
            sums={name: torch.zeros_like(value) for name, value in self._sums.items()},
        )
