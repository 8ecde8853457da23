"""Forward and backward of a network as a story of memory: which tensors exist when.

It follows torch's autograd engine. A tensor lives until nobody refers to it: variables of the
forward pass, and what operations save for backward. In backward, nodes run in the reverse order;
the saved tensors of a node are released when it has run, and so is the gradient that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeline.forecast.ledger import Ledger

ACTIVATIONS = "activations"
GRADIENTS = "gradients of activations"


@dataclass(eq=False, slots=True)
class Value:
    """A tensor's memory."""

    bytes: int
    item: str
    refs: int = 1
    graded: bool = True
    """Whether backward computes its gradient."""
    gradient: Value | None = None
    element: int = 0
    """Bytes of one of its numbers, where somebody will ask."""
    shared: bool = False
    """Whether it is a view of another tensor, so that it is not added to in place."""
    leaf: Callable[[Value], None] | None = None
    """Of a parameter: what becomes of its gradient."""
    base: Value | None = None
    """Whose memory it is, if it is a part of another tensor."""


Backward = Callable[[Value], Iterable[tuple[Value, "Value | None"]]]
"""Given the gradient of the output: pairs of an input and the gradient that it gets."""


@dataclass(eq=False, slots=True)
class Node:
    """An operation, as backward knows it."""

    output: Value
    saved: Sequence[Value]
    backward: Backward
    takes: bool
    """Whether backward takes the reference to the gradient that it is given."""


class Tape:
    """Records operations and runs them backward, telling a ledger what that takes."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.recording = True
        """False: nothing is saved, as in the first pass over a part that is computed again."""
        self._nodes: list[Node | Callable[[], None]] = []

    def make(self, size: int, item: str = ACTIVATIONS, *, graded: bool = True) -> Value:
        """A new tensor of so many bytes, with one reference."""
        self.ledger.change(item, size)
        return Value(size, item, graded=graded)

    def part(self, base: Value, size: int) -> Value:
        """So many bytes of a tensor, which stays for as long as they are referred to; with one
        reference."""
        value = Value(size, base.item, graded=base.graded, element=base.element)
        value.base = self.hold(base)
        return value

    def hold(self, value: Value) -> Value:
        """One reference more."""
        value.refs += 1
        return value

    def drop(self, *values: Value | None) -> None:
        """One reference less; without any, the memory is free."""
        for value in values:
            if value is not None:
                value.refs -= 1
                if value.refs:
                    continue
                if value.base is None:
                    self.ledger.change(value.item, -value.bytes)
                else:
                    self.drop(value.base)

    def pulse(self, size: int, item: str = ACTIVATIONS) -> None:
        """A tensor that is gone at once."""
        self.ledger.pulse(item, size)

    def node(
        self, output: Value, saved: Iterable[Value], backward: Backward, *, takes: bool = False
    ) -> Value:
        """Note that `output` was computed so."""
        if self.recording and output.graded:
            held = [self.hold(value) for value in saved]
            self._nodes.append(Node(output, held, backward, takes))
        return output

    def then(self, action: Callable[[], None]) -> None:
        """Have backward do something when it comes to this place."""
        if self.recording:
            self._nodes.append(action)

    def mark(self) -> int:
        """A place on the tape."""
        return len(self._nodes)

    def run_back(self, to: int = 0) -> None:
        """Run backward what was recorded since the place `to`; outputs have their gradients."""
        while len(self._nodes) > to:
            node = self._nodes.pop()
            if not isinstance(node, Node):
                node()
                continue
            gradient, node.output.gradient = node.output.gradient, None
            parts = [] if gradient is None else list(node.backward(gradient))
            self.drop(None if node.takes else gradient, *node.saved)
            for value, part in parts:
                self.accumulate(value, part)

    def accumulate(self, value: Value, part: Value | None) -> None:
        """Add to a value's gradient."""
        if part is None:
            return
        if value.leaf is not None:
            value.leaf(part)
        elif not value.graded:
            self.drop(part)
        elif value.gradient is None:
            value.gradient = part
        elif value.gradient.refs == 1 and not value.gradient.shared:  # it is added to in place
            self.drop(part)
        else:
            total = self.make(part.bytes, GRADIENTS)
            self.drop(part, value.gradient)
            value.gradient = total
