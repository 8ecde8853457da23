"""Layers of transformers as stories of memory, operation by operation as torch runs them.

Sizes are bytes; `c` is the size of a number in the compute dtype. What an operation saves for
backward is in torch's tools/autograd/derivatives.yaml.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.forecast.tape import GRADIENTS, Tape, Value

if TYPE_CHECKING:
    from pipeline.forecast.placement import Placement
    from pipeline.forecast.shapes import Weight

WIDE = 4
"""Bytes of a number in fp32, in which norms and losses are computed."""

Parts = Iterator[tuple[Value, "Value | None"]]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one rank computes at a time."""

    samples: int
    length: int
    packed: bool = False
    mask: int | None = None
    """Bytes of a number of dropout's mask; None: as of what is dropped."""

    @property
    def tokens(self) -> int:
        """Padding counted."""
        return self.samples * self.length

    @property
    def positions(self) -> int:
        """Tokens with a position of their own: samples that are one document each share theirs."""
        return self.tokens if self.packed else self.length


@dataclass(kw_only=True)
class Kept:
    """Results that a part which is computed again keeps from the first time (selective activation
    checkpointing): filled in forward, used up in backward."""

    products: bool = False
    attention: bool = False
    filling: deque[Value] | None = None
    using: deque[Value] | None = None


class Net:
    """A network on one rank: layers that tell their tape, on weights that a strategy holds.

    Layers keep references to nothing; `replaced` gives up the one to what a variable held before.
    """

    def __init__(self, tape: Tape, placement: Placement, batch: Batch, compute: int) -> None:
        self.tape = tape
        self.placement = placement
        self.batch = batch
        self.c = compute
        self.kept = Kept()
        self._using: list[dict[Weight, Value]] = []

    @contextlib.contextmanager
    def module(self, *weights: Weight | None) -> Iterator[None]:
        """Inside runs the forward method of a module which has these weights, its own or its
        children's."""
        scope = {w: self.placement.use(self.tape, w, self.c) for w in weights if w is not None}
        self._using.append(scope)
        yield
        self._using.pop()
        self.tape.drop(*scope.values())

    def weight(self, weight: Weight) -> Value:
        """The weight as the innermost module that has it reads it."""
        return next(scope[weight] for scope in reversed(self._using) if weight in scope)

    def tensor(self, elements: int, size: int | None = None, *, graded: bool = True) -> Value:
        """A new activation of numbers of so many bytes (the compute dtype's)."""
        size = size or self.c
        made = self.tape.make(elements * size, graded=graded)
        made.element = size
        return made

    def _result(self, elements: int, size: int, graded: bool, *, kept: bool) -> Value:
        """A new tensor, or the one that was kept when it was computed the first time."""
        if kept and self.kept.using:
            value = self.kept.using.popleft()
            value.graded = graded
            return value
        value = self.tensor(elements, size, graded=graded)
        if kept and self.kept.filling is not None:
            self.kept.filling.append(self.tape.hold(value))
        return value

    def gradient(self, size: int) -> Value:
        """A new gradient of so many bytes."""
        return self.tape.make(size, GRADIENTS)

    def replaced(self, old: Value, new: Value) -> Value:
        """The variable that held `old` holds `new`."""
        self.tape.drop(old)
        return new

    def linear(self, x: Value, weight: Weight, bias: Weight | None = None) -> Value:
        """Matrix product with a weight, and with its update if it has one."""
        update = weight.update
        if update is None:
            return self._product(x, weight, bias)
        tape = self.tape
        with self.module(*weight.parts):
            out = self._product(x, weight, bias)
            dropped = self.dropped(x) if update.dropout else tape.hold(x)
            narrow = self._product(dropped, update.down)
            tape.drop(dropped)
            wide = self._product(narrow, update.up)
            tape.drop(narrow)
            scaled = self.by_number(wide)
            tape.drop(wide)
            total = self.add(out, scaled)
            tape.drop(out, scaled)
            return total

    def _product(self, x: Value, weight: Weight, bias: Weight | None = None) -> Value:
        w, b = self.weight(weight), None if bias is None else self.weight(bias)
        graded = x.graded or w.graded or bool(b and b.graded)
        unpacked = None if weight.packed is None else self.tensor(weight.elements)
        rows = self.batch.tokens
        out = self._result(rows * weight.outputs, self.c, graded, kept=self.kept.products)
        self.tape.drop(unpacked)

        def back(upstream: Value) -> Parts:
            again = self.gradient(weight.elements * self.c) if unpacked else None
            mine = self.gradient(x.bytes) if x.graded else None
            self.tape.drop(again)
            own = self.gradient(weight.elements * self.c) if w.graded else None
            for view in (mine, own):
                if view is not None:
                    view.shared = True
            if b is not None and bias is not None and b.graded:
                yield b, self.gradient(bias.elements * self.c)
            yield w, own
            yield x, mine

        saved = [*([x] if w.graded else []), *([w] if x.graded else [])]
        return self.tape.node(out, saved, back)

    def dropped(self, x: Value) -> Value:
        """Dropout, which keeps its mask."""
        mask = self.tensor(x.bytes // x.element, self.batch.mask or x.element, graded=False)
        out = self.tensor(x.bytes // x.element, x.element, graded=x.graded)

        def back(upstream: Value) -> Parts:
            yield x, self.gradient(x.bytes)

        self.tape.node(out, [mask], back)
        self.tape.drop(mask)
        return out

    def like(self, x: Value, size: int | None = None) -> Value:
        """A new tensor of as many numbers, of so many bytes (as those of `x`), of the same item."""
        size = size or x.element
        made = self.tape.make(x.bytes // x.element * size, x.item, graded=x.graded)
        made.element = size
        return made

    def by_number(self, x: Value) -> Value:
        """Product or quotient with a constant; keeps nothing."""

        def back(upstream: Value) -> Parts:
            yield x, self.gradient(x.bytes)

        return self.tape.node(self.like(x), [], back)

    def cast(self, x: Value, size: int) -> Value:
        """Another dtype; the same tensor where it has numbers of that size already."""
        if size == x.element:
            return self.tape.hold(x)
        out = self.tensor(x.bytes // x.element, size, graded=x.graded)

        def back(upstream: Value) -> Parts:
            yield x, self.gradient(x.bytes)

        return self.tape.node(out, [], back)

    def scaled(self, x: Value, weight: Weight) -> Value:
        """Product with a weight that is a vector."""
        w = self.weight(weight)
        out = self.tensor(x.bytes // x.element, x.element, graded=x.graded or w.graded)

        def back(upstream: Value) -> Parts:
            if w.graded:
                full = self.gradient(x.bytes)
                own = self.gradient(weight.elements * self.c)
                mine = self.gradient(x.bytes) if x.graded else None
                self.tape.drop(full)
                yield w, own
                yield x, mine
            else:
                yield x, self.gradient(x.bytes)

        saved = [*([x] if w.graded else []), *([w] if x.graded else [])]
        return self.tape.node(out, saved, back)

    def rms_norm(self, x: Value, weight: Weight) -> Value:
        """As transformers writes it: normalised in fp32, scaled in the compute dtype."""
        with self.module(weight):
            wide = self.normalised(x, weight.shape[-1])
            narrow = self.cast(wide, self.c)
            out = self.scaled(narrow, weight)
            self.tape.drop(wide, narrow)
            return out

    def normalised(self, x: Value, width: int) -> Value:
        """Rows of so many numbers over the root of the mean of their squares, in fp32."""
        wide = self.cast(x, WIDE)
        elements = wide.bytes // WIDE
        rows = self.tensor(max(elements // width, 1), WIDE, graded=x.graded)
        self.tape.pulse(wide.bytes)  # squares
        normed = self.tensor(elements, WIDE, graded=x.graded)
        self.tape.node(normed, [wide, rows], lambda _: self._normed_back(wide))
        self.tape.drop(wide, rows)
        return normed

    def _normed_back(self, wide: Value) -> Parts:
        size = wide.bytes
        through = self.gradient(size)
        self.tape.pulse(size, GRADIENTS)  # the root's, before it is summed over a row
        mean = self.gradient(size)
        power = self.gradient(size)
        self.tape.pulse(size, GRADIENTS)
        self.tape.drop(mean)
        yield wide, through
        yield wide, power

    def add(self, x: Value, y: Value) -> Value:
        """A sum; its gradient is both summands' gradient, without a copy."""
        out = self.tensor(x.bytes // x.element, x.element, graded=x.graded or y.graded)

        def back(upstream: Value) -> Parts:
            for summand in (x, y):
                yield summand, self.tape.hold(upstream) if summand.graded else None

        return self.tape.node(out, [], back)

    def multiply(self, x: Value, y: Value) -> Value:
        """A product, element by element."""
        out = self.tensor(x.bytes // x.element, x.element, graded=x.graded or y.graded)

        def back(upstream: Value) -> Parts:
            mine, other = self.gradient(x.bytes), self.gradient(y.bytes)
            yield x, mine
            yield y, other

        return self.tape.node(out, [x, y], back)

    def activation(self, x: Value) -> Value:
        """SiLU, GELU and their like, as one operation."""
        out = self.tensor(x.bytes // x.element, x.element, graded=x.graded)

        def back(upstream: Value) -> Parts:
            yield x, self.gradient(x.bytes)

        return self.tape.node(out, [x], back)

    def rotary(self, x: Value) -> Value:
        """Rotary position embedding; sines and cosines are the model's, and not counted here."""
        elements = x.bytes // x.element
        by_cosine = self.tensor(elements)
        turned, by_sine = self.tensor(elements), self.tensor(elements)
        out = self.tensor(elements, graded=x.graded)
        self.tape.drop(by_cosine, turned, by_sine)

        def back(upstream: Value) -> Parts:
            by_sine = self.gradient(x.bytes)
            half, padded = self.gradient(x.bytes // 2), self.gradient(x.bytes)
            self.tape.pulse(x.bytes, GRADIENTS)
            self.tape.drop(by_sine, half, padded)
            yield x, self.gradient(x.bytes)

        return self.tape.node(out, [], back)

    def attention(self, q: Value, k: Value, v: Value, heads: int, *, masked: bool) -> Value:
        """Attention that never holds its matrix (Dao et al. 2022, FlashAttention): keeps its
        inputs, the output and a logarithm of a sum for each head and token."""
        tape = self.tape
        masks = [self._mask()] if masked else []
        graded = q.graded or k.graded or v.graded
        kept = self.kept.attention
        sums = self._result(self.batch.tokens * heads, WIDE, graded, kept=kept)
        out = self._result(q.bytes // q.element, self.c, graded, kept=kept)

        def back(upstream: Value) -> Parts:
            for x in (q, k, v):
                yield x, self.gradient(x.bytes)

        tape.node(out, [q, k, v, out, sums, *masks], back)
        tape.drop(sums, *masks)
        return out

    def _mask(self) -> Value:
        """Numbers that are added to products."""
        return self.tensor(self.batch.tokens * self.batch.length, graded=False)

    def repeated(self, x: Value, times: int) -> Value:
        """Keys or values of a head, once for each of so many heads; the same tensor for one."""
        if times == 1:
            return self.tape.hold(x)
        out = self.tensor(x.bytes // x.element * times, x.element, graded=x.graded)

        def back(upstream: Value) -> Parts:
            yield x, self.gradient(x.bytes)

        return self.tape.node(out, [], back)

    def embedding(self, weight: Weight, rows: int | None = None) -> Value:
        """So many rows of a table (one for each token); keeps their numbers alone."""
        rows = rows or self.batch.tokens
        with self.module(weight):
            w = self.weight(weight)
            out = self.tensor(rows * weight.shape[1], graded=w.graded)

            def back(upstream: Value) -> Parts:
                yield w, self.gradient(weight.elements * self.c)

            return self.tape.node(out, [], back)
