"""Parts of a model, reported to a tracker while they run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipeline.planning.forecast import BACKWARD, FORWARD, LOAD
from pipeline.planning.trace.torch_compat import tensors_in
from pipeline.planning.trace.tracker import (
    HEAD,
    INPUT,
    LOSS,
    START,
    MemoryTracker,
    Part,
    Position,
)


class Marks:
    """Reports to a tracker which phase and which part of the model runs."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._phase = LOAD
        self._visits: dict[str, int] = {}

    def phase(self, name: str) -> None:
        """Begin a phase."""
        self._phase = name
        self._visits[name] = self._visits.get(name, -1) + 1
        self.part(START)

    def part(self, part: Part) -> None:
        """Begin a part of the model."""
        self._tracker.enter(Position(self._phase, self._visits[self._phase], part))

    @contextlib.contextmanager
    def watching(self, model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, report the parts of the model."""
        handles = [model.register_forward_hook(self._after_model)]
        for place, block in enumerate(blocks):
            handles += self._hooks(place, block, last=place == len(blocks) - 1)
        yield
        for handle in handles:
            handle.remove()

    @contextlib.contextmanager
    def watching_stages(self, stages: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, report whether stages of a pipeline, which take turns, run forward or
        backward."""

        def before(module: nn.Module, inputs: Any) -> None:
            self.phase(FORWARD)

        def after(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: self.phase(BACKWARD))  # type: ignore[no-untyped-call]

        handles = [one.register_forward_pre_hook(before, prepend=True) for one in stages]
        handles += [one.register_forward_hook(after) for one in stages]
        yield
        for handle in handles:
            handle.remove()

    def _after_model(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self.part(LOSS)
        self._mark(output, HEAD)

    def _mark(self, tensors: Any, part: Part) -> None:
        """Begin the part when backward gives the first of these tensors its gradient."""
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
