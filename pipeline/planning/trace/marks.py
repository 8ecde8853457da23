"""Marks of where a training step is: its phase, and the part of the model that runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from pipeline.planning.strategy import LOAD
from pipeline.planning.trace.torch_compat import tensors_in
from pipeline.planning.trace.tracker import MemoryTracker, Part, Position

START, HEAD, LOSS, INPUT = "start", "head", "loss", "input"
"""Parts of a model that are no block. In forward: before the first block, behind the last, behind
the model. In backward: before everything (START), behind the loss (HEAD), behind all blocks
(INPUT)."""


class Marks:
    """Tells a tracker which phase and which part of the model runs."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._phase = LOAD
        self._entered: dict[str, int] = {}

    def phase(self, name: str) -> None:
        """Hear that a phase begins."""
        self._phase = name
        self._entered[name] = self._entered.get(name, -1) + 1
        self.part(START)

    def part(self, part: Part) -> None:
        """Hear that a part of the model begins."""
        self._tracker.enter(Position(self._phase, self._entered[self._phase], part))

    @contextlib.contextmanager
    def watching(self, model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, the tracker is results which part of the model runs."""
        handles = [model.register_forward_hook(self._given)]
        for place, block in enumerate(blocks):
            handles += self._hooks(place, block, last=place == len(blocks) - 1)
        yield
        for handle in handles:
            handle.remove()

    def _given(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self.part(LOSS)
        self._mark(output, HEAD)

    def _mark(self, tensors: Any, part: Part) -> None:
        """Have backward come to this part with the gradient of the first tensor."""
        first = next((one for one in tensors_in(tensors) if one.is_floating_point()), None)
        if first is not None and first.requires_grad:
            first.register_hook(lambda _: self.part(part))  # type: ignore[no-untyped-call]

    def _hooks(self, place: int, block: nn.Module, *, last: bool) -> list[RemovableHandle]:
        def before(module: nn.Module, inputs: Any, named: Any) -> None:
            self.part(place)
            if place == 0:
                self._mark((inputs, named), INPUT)

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            self._mark(output, place)
            if last:
                self.part(HEAD)

        return [
            block.register_forward_pre_hook(before, with_kwargs=True),
            block.register_forward_hook(after),
        ]
