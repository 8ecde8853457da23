"""The micro-batches of a step, run forward and backward through this rank's part of a model."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from pipeline import DistContext, LossParts, Measure, MicroBatch, Scorer
from stages.batches.layout import padded, sequence_slice
from stages.model.rotary_compat import depends_on_length, with_positions
from stages.objectives.compat import known_documents
from stages.objectives.cross_entropy import StepSums, measured
from stages.wrap.axes import Axes

Around = Callable[[bool], AbstractContextManager[None]]
Backward = Callable[[Tensor], object]


class Passes(ABC):
    """This rank's parts of a model, its place on the axes, and the way of micro-batches through
    both. Without `axes`, all ranks are data-parallel."""

    def __init__(
        self, parts: Sequence[nn.Module], dist: DistContext, axes: Axes | None = None
    ) -> None:
        """`parts` are modules with names as in the source."""
        self.parts, self.device = tuple(parts), dist.device
        self.axes = axes or Axes(data=dist.world_size)
        self.here = self.axes.coordinates(dist.rank)

    @abstractmethod
    def train(
        self, batches: Iterable[MicroBatch], sums: StepSums, around: Around, backward: Backward
    ) -> LossParts:
        """Run forward and backward of a step; returns this rank's part of each sum. Where
        micro-batches pass one after another, `around(last)` surrounds each, and `backward` is
        called with its loss."""

    @abstractmethod
    def evaluate(self, batches: Iterable[MicroBatch], measure: Measure) -> Generator[Tensor | None]:
        """See `Engine.evaluate`."""

    @property
    def counts_rows(self) -> bool:
        """Whether sums and rows are this rank's to return, of all that compute them alike."""
        return self.here.tensor == 0 and self.here.context == 0

    @functools.cached_property
    def _by_length(self) -> bool:
        """Whether the model has to know how long each document is."""
        return any(map(depends_on_length, self.parts))

    def laid_out(self, batch: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
        """The micro-batch padded to a length that the axes divide, and this rank's part of it: all
        of it, or its slice of the tokens."""
        context = self.axes.context
        whole = padded(batch, context * self.axes.tensor)
        if self._by_length:
            whole = with_positions(whole)
        own = whole if context == 1 else sequence_slice(whole, self.here.context, context)
        return whole, own


class ModulePasses(Passes):
    """Runs micro-batches one after another through one module, the whole model."""

    def __init__(
        self, module: nn.Module, scorer: Scorer, dist: DistContext, axes: Axes | None = None
    ) -> None:
        super().__init__([module], dist, axes)
        self._scorer = scorer

    def train(
        self, batches: Iterable[MicroBatch], sums: StepSums, around: Around, backward: Backward
    ) -> LossParts:
        rest = iter(batches)
        batch = next(rest, None)
        while batch is not None:
            following = next(rest, None)
            whole, own = self.laid_out(batch)
            with around(following is None), known_documents(own):
                backward(sums.judge(self._scorer, own, whole))
            batch = following
        return sums.part(counted=self.counts_rows)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], measure: Measure) -> Generator[Tensor | None]:
        with evaluating(self.parts):
            for batch in batches:
                whole, own = self.laid_out(batch)
                with known_documents(own):
                    rows = measured(measure, self._scorer, own, whole)
                yield rows if self.counts_rows else None


@contextlib.contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode in the body, and back into training mode."""
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in modules:
            module.train()
