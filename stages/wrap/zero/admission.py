"""Leave out an update under ZeRO, after the gradient norm is known and before a weight changes.

Both happen inside one call of DeepSpeed. In between it calls the torch optimizer that it was given,
and that has public hooks: gradients are taken away before its step, which then changes nothing, and
given back after it, because offloaded ones are buffers that DeepSpeed goes on using.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.engine import Admit


@dataclass
class Answer:
    """What came of asking in one step."""

    refused: bool = False


@dataclass
class _Question:
    """To be asked once in a step, however many optimizers and groups take part in it."""

    admit: Admit
    norm: Callable[[], float]
    answer: Answer
    asked: bool = False
    hidden: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)

    def refused(self) -> bool:
        if not self.asked:
            self.asked, self.answer.refused = True, not self.admit(self.norm())
        return self.answer.refused


class Admission:
    """Stands before the steps of these optimizers."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._question: _Question | None = None
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    @contextlib.contextmanager
    def asking(self, admit: Admit | None, norm: Callable[[], float]) -> Iterator[Answer]:
        """Let steps in the body depend on what `admit` says to `norm()`, which is called when an
        optimizer is about to step; without `admit`, on nothing."""
        answer = Answer()
        self._question = None if admit is None else _Question(admit, norm, answer)
        try:
            yield answer
        finally:
            self._question = None

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        question = self._question
        if question is None or not question.refused():
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    question.hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._question is not None:
            for parameter, gradient in self._question.hidden:
                parameter.grad = gradient
            self._question.hidden.clear()
