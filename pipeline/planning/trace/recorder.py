"""A meter that keeps every part of a micro-batch: how memory rose and fell, and what was
computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.planning.trace.flops import ATTENTION, operations
from pipeline.planning.trace.meter import Meter, Moment
from pipeline.planning.trace.torch_compat import computes_again

HOST = "offloaded activations"
"""Item of what a model moves to the host until backward."""


@dataclass(kw_only=True)
class Stretch:
    """What happens from one mark to the next."""

    moment: Moment
    levels: list[tuple[int, int]]
    """Bytes of the device and of the host: at the beginning, and whenever either changed."""
    products: float = 0.0
    attention: float = 0.0
    again: float = 0.0
    """Floating-point operations; `again` those of what is computed a second time."""
    made: int = 0
    """Bytes of tensors that were made."""
    repeats: bool = False
    """Whether anything is computed a second time."""


class Recorder(Meter):  # type: ignore[no-untyped-call]
    """A meter of tensors without values, stretch by stretch."""

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []
        super().__init__(fake=True)

    def enter(self, moment: Moment) -> None:
        self.stretches.append(Stretch(moment=moment, levels=[self._levels()]))
        super().enter(moment)

    def operation(self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        before = self.now
        out = super().operation(function, arguments, named)
        if self.stretches:
            here = self.stretches[-1]
            here.made += max(self.now - before, 0)
            kind, amount = operations(function, arguments, named, out)
            again = computes_again()
            here.repeats = here.repeats or again
            if again:
                here.again += amount
            elif kind == ATTENTION:
                here.attention += amount
            else:
                here.products += amount
        return out

    def own(self, item: str, tensors: Iterable[Tensor], *, replace: bool = True) -> None:
        super().own(item, tensors, replace=replace)
        self._count()

    def _levels(self) -> tuple[int, int]:
        host = self._held.get(HOST, 0)
        return self.now - host, host

    def _count(self) -> None:
        super()._count()
        if self.stretches:
            self.stretches[-1].levels.append(self._levels())


@contextlib.contextmanager
def offloading(meter: Meter, device: str) -> Iterator[None]:
    """Inside, what activation checkpointing moves to the host is an item of its own on machines
    where the host is another place. Here all tensors are on CPUs, and none would be moved."""
    original = torch.autograd.graph.save_on_cpu

    def moved(pin_memory: bool = False, device_type: str = "cuda") -> Any:
        def pack(tensor: Tensor) -> Tensor:
            there = tensor.clone()
            meter.own(HOST, [there])
            return there

        return torch.autograd.graph.saved_tensors_hooks(pack, torch.clone)

    if device != "cpu":
        torch.autograd.graph.save_on_cpu = moved  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.autograd.graph.save_on_cpu = original  # type: ignore[misc]
