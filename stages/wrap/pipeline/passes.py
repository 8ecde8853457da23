"""The micro-batches of a step, passed through the stages of a pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pipeline import DistContext, LossParts, Measure, MicroBatch, Scorer
from stages.batches.layout import equal_shapes
from stages.model.documents_compat import known_documents
from stages.objectives.judge import StepSums, measured
from stages.wrap.axes import Axes
from stages.wrap.passes import Around, Backward, Passes, evaluating
from stages.wrap.pipeline.schedule import Passed, Pipeline

EVALUATED = 4
"""Micro-batches for each stage that an evaluation passes on at a time."""


class PipelinePasses(Passes):
    """Runs all micro-batches of a step at once; `parts` are this rank's stages."""

    def __init__(
        self, pipeline: Pipeline, parts: Sequence[nn.Module], dist: DistContext, axes: Axes
    ) -> None:
        super().__init__(parts, dist, axes)
        self._pipeline = pipeline

    def train(
        self, batches: Iterable[MicroBatch], sums: StepSums, around: Around, backward: Backward
    ) -> LossParts:
        even = self._even(batches)

        def loss(scorer: Scorer, number: int, inputs: Mapping[str, Tensor]) -> Tensor:
            whole, own = even[number]
            return sums.judge(scorer, own, whole, **inputs)

        with known_documents(*(own for _, own in even)):
            self._pipeline.run(even, loss)
        return sums.part(counted=self.counts_rows)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], measure: Measure) -> Generator[Tensor | None]:
        rest, size = iter(batches), EVALUATED * self.axes.pipeline
        with evaluating(self.parts):
            while some := list(itertools.islice(rest, size)):
                found = self._measured(self._even(some), measure)
                yield from (found.get(number) for number in range(len(some)))

    def _measured(self, even: Sequence[Passed], measure: Measure) -> dict[int, Tensor]:
        """The rows of each micro-batch that are this rank's to give."""
        found: dict[int, Tensor] = {}

        def rows(scorer: Scorer, number: int, inputs: Mapping[str, Tensor]) -> Tensor:
            whole, own = even[number]
            found[number] = measured(measure, scorer, own, whole, **inputs)
            return torch.zeros((), device=self.device)

        with known_documents(*(own for _, own in even)):
            self._pipeline.run(even, rows)
        return found if self.counts_rows else {}

    @property
    def counts_rows(self) -> bool:
        return super().counts_rows and self._pipeline.ends_here

    def _even(self, batches: Iterable[MicroBatch]) -> list[Passed]:
        """The micro-batches and this rank's part of each, all of one shape."""
        given = list(batches)
        even = equal_shapes(given, self._pipeline.least(len(given)))
        return [self.laid_out(one) for one in even]
