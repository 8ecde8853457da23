"""An engine whose ranks each call one module that is the whole model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from pipeline import DataAxis, DistContext, Engine, MicroBatch, Objective

T = TypeVar("T")


class ModuleEngine(Engine):
    """Runs micro-batches one after another."""

    def __init__(self, model: nn.Module, dist: DistContext) -> None:
        self.model = model
        self.modules = (model,)
        self.device = dist.device
        self.data_axis = DataAxis(index=dist.rank, count=dist.world_size)

    @property
    def averaged_over(self) -> int:
        """Number of ranks over whose gradients the strategy averages. The loss is multiplied by it,
        so that they are summed, and the sum stays in the range of narrow dtypes."""
        return self.data_axis.count

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
            with self.microbatch(last=last):
                loss = objective(self.model, batch)
                self.backward(loss * (scale * self.averaged_over))
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], objective: Objective) -> Tensor:
        total = torch.zeros((), device=self.device)
        self.model.eval()
        try:
            for batch in batches:
                total += objective(self.model, batch)
        finally:
            self.model.train()
        return total


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last; the one after it is taken first."""
    taken: list[T] = []
    for item in items:
        if taken:
            yield taken.pop(), False
        taken.append(item)
    for item in taken:
        yield item, True
