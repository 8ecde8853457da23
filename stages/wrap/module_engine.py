"""An engine whose ranks each call one module that is the whole model."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from pipeline import DistContext, Engine, MicroBatch, Objective
from stages.model.documents_compat import known_documents
from stages.model.rotary_compat import depends_on_length, with_positions
from stages.wrap.axes import Axes
from stages.wrap.context.attention import own_tokens
from stages.wrap.padding import padded

T = TypeVar("T")


class ModuleEngine(Engine):
    """Runs micro-batches one after another. Without `axes`, all ranks are data-parallel."""

    _waiting: Callable[[], None] | None = None
    """To be called before the training state changes."""

    def __init__(self, model: nn.Module, dist: DistContext, axes: Axes | None = None) -> None:
        self.model = model
        self.modules = (model,)
        self.device = dist.device
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
        self, batches: Iterable[MicroBatch], objective: Objective, *, scale: float
    ) -> Tensor:
        total = torch.zeros((), device=self.device)
        for batch, last in with_last(batches):
            own = self._own(batch)
            with self.microbatch(last=last), known_documents(own):
                loss = objective(self.model, own)
                self.backward(loss * (scale * self.averaged_over))
            total += loss.detach()
        return self._part(total)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], objective: Objective) -> Tensor:
        total = torch.zeros((), device=self.device)
        self.model.eval()
        try:
            for batch in batches:
                own = self._own(batch)
                with known_documents(own):
                    total += objective(self.model, own)
        finally:
            self.model.train()
        return self._part(total)

    @functools.cached_property
    def _by_length(self) -> bool:
        """Whether the model has to be told how long each document is."""
        return any(map(depends_on_length, self.modules))

    def _own(self, batch: MicroBatch) -> MicroBatch:
        """This rank's part of a micro-batch: all of it, or its slice of the tokens."""
        if self._by_length:
            batch = with_positions(padded(batch, self._axes.context * self._axes.tensor))
        return own_tokens(batch, self._axes, self._here.context)

    def _part(self, total: Tensor) -> Tensor:
        """This rank's part of a loss, which a tensor-parallel group computes alike."""
        return total if self._here.tensor == 0 else torch.zeros_like(total)


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last; the one after it is taken first."""
    taken: list[T] = []
    for item in items:
        if taken:
            yield taken.pop(), False
        taken.append(item)
    for item in taken:
        yield item, True
