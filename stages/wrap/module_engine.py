"""An engine whose ranks each call one module that is the whole model."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from pipeline import DistContext, Engine, LossParts, Measure, MicroBatch, Objective, Scorer, Unit
from stages.batches.layout import padded, sequence_slice
from stages.model.documents_compat import known_documents
from stages.model.rotary_compat import depends_on_length, with_positions
from stages.objectives.judge import StepSums, judged, measured
from stages.wrap.axes import Axes

T = TypeVar("T")


class ModuleEngine(Engine):
    """Runs micro-batches one after another. Without `axes`, all ranks are data-parallel."""

    _waiting: Callable[[], None] | None = None
    """To be called before the training state changes."""

    def __init__(
        self, model: nn.Module, scorer: Scorer, dist: DistContext, axes: Axes | None = None
    ) -> None:
        self.model = model
        self.modules = (model,)
        self.device = dist.device
        self._scorer = scorer
        self._axes = axes or Axes(data=dist.world_size)
        self._here = self._axes.coordinates(dist.rank)
        self.data_axis = self._here.data
        self.random_stream, self.random_streams = self._here.stream, self._axes.streams

    @property
    @abstractmethod
    def lasting_fragments(self) -> bool:
        """Whether fragments of parameters are the state itself, and in memory."""

    def before_change(self, call: Callable[[], None]) -> bool:
        if self.lasting_fragments:
            self._waiting = call
        return self.lasting_fragments

    def announce_change(self) -> None:
        """Announce that the training state is about to change."""
        call, self._waiting = self._waiting, None
        if call is not None:
            call()

    @property
    def averaged_over(self) -> int:
        """Number of ranks over whose gradients the strategy averages. The loss is multiplied by it,
        so that they are summed, and the sum stays in the range of narrow dtypes."""
        return self._axes.data * self._axes.context

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Surround one forward and backward; `last` is True for the final one of a step, in which
        gradients have to be reduced over ranks."""
        return nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of `loss`, a scalar."""

    def accumulate(
        self, batches: Iterable[MicroBatch], objective: Objective, *, counts: Mapping[Unit, float]
    ) -> LossParts:
        sums = StepSums(objective, self.device, counts, factor=self.averaged_over)
        for batch, last in with_last(batches):
            whole, own = self.laid_out(batch)
            with self.microbatch(last=last), known_documents(own):
                self.backward(sums.add(judged(objective, self._scorer, own, whole)))
        return sums.part(counted=self.counts_rows)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], measure: Measure) -> Generator[Tensor | None]:
        self.model.eval()
        try:
            for batch in batches:
                whole, own = self.laid_out(batch)
                with known_documents(own):
                    rows = measured(measure, self._scorer, own, whole)
                yield rows if self.counts_rows else None
        finally:
            self.model.train()

    @functools.cached_property
    def _by_length(self) -> bool:
        """Whether the model has to be told how long each document is."""
        return any(map(depends_on_length, self.modules))

    def laid_out(self, batch: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
        """The micro-batch padded to a length that the axes divide, and this rank's part of it: all
        of it, or its slice of the tokens."""
        context = self._axes.context
        whole = padded(batch, context * self._axes.tensor)
        if self._by_length:
            whole = with_positions(whole)
        own = whole if context == 1 else sequence_slice(whole, self._here.context, context)
        return whole, own

    @property
    def counts_rows(self) -> bool:
        """Whether sums and rows are this rank's to give, of all that compute them alike."""
        return self._here.tensor == 0 and self._here.context == 0


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last; the one after it is taken first."""
    taken: list[T] = []
    for item in items:
        if taken:
            yield taken.pop(), False
        taken.append(item)
    for item in taken:
        yield item, True
