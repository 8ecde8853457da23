"""A training step as a story of memory."""

from __future__ import annotations

from pipeline.forecast.net import WIDE, Net
from pipeline.forecast.placement import Placement
from pipeline.forecast.shapes import BlockShape, ModelShape
from pipeline.forecast.tape import GRADIENTS, Value

LOGITS = "logits and loss"
PIECE = 1 << 24
"""Elements of the product that `linear_loss` makes at a time."""


class Story:
    """Micro-batches of one rank."""

    def __init__(self, model: ModelShape, net: Net, placement: Placement, chunk: int | None) -> None:
        self._model = model
        self._net = net
        self._tape = net.tape
        self._placement = placement
        self._chunk = chunk

    def microbatch(self, *, last: bool) -> None:
        """Forward, loss and backward."""
        placement, tape = self._placement, self._tape
        tape.ledger.phase("forward")
        placement.begin(last=last)
        placement.before_forward(None)
        tape.then(lambda: placement.after_backward(None))
        out = self._model.forward(self._net, self._blocks, self._output)
        placement.after_forward(None)
        loss = self._in_full(out) if self._chunk is None else out
        tape.ledger.phase("backward")
        placement.before_backward(None)
        tape.accumulate(loss, self._net.gradient(WIDE))
        tape.run_back()
        tape.drop(loss)

    def _blocks(self, x: Value) -> Value:
        for place, block in enumerate(self._model.blocks):
            x = self._net.replaced(x, self._block(place, block, x))
        return x

    def _block(self, place: int, block: BlockShape, x: Value) -> Value:
        placement, tape = self._placement, self._tape
        placement.before_forward(place)
        tape.then(lambda: placement.after_backward(place))
        again = self._model.recomputed
        if again is not None and place % again.every == 0:
            out = self._recomputed(block, x)
        else:
            out = block.forward(self._net, x)
        tape.then(lambda: placement.before_backward(place))
        placement.after_forward(place)
        return out

    def _recomputed(self, block: BlockShape, x: Value) -> Value:
        tape = self._tape
        tape.recording = False
        out = block.forward(self._net, x)
        tape.recording = True

        def back(upstream: Value) -> list[tuple[Value, Value | None]]:
            inner = Value(0, GRADIENTS, graded=x.graded)
            inner.bytes, inner.element = x.bytes, x.element
            tape.hold(inner)
            start = tape.mark()
            result = block.forward(self._net, inner)
            tape.accumulate(result, tape.hold(upstream))
            tape.drop(result)
            tape.run_back(start)
            return [(x, inner.gradient)]

        return tape.node(out, [x], back)

    def _output(self, hidden: Value) -> Value:
        """Logits, or the loss itself where it is computed in chunks."""
        if self._chunk is not None:
            return self._in_chunks(hidden, self._chunk)
        logits = self._tensor(self._net.linear(hidden, self._model.output))
        self._tape.drop(hidden)
        return logits

    def _in_full(self, logits: Value) -> Value:
        """What `SummedLoss.in_full` does."""
        net, tape = self._net, self._tape
        wide = self._tensor(net.cast(logits, WIDE))
        logarithms = tape.make(wide.bytes, LOGITS)
        tape.drop(wide)
        loss = tape.make(WIDE, LOGITS)

        def back(upstream: Value) -> list[tuple[Value, Value | None]]:
            by_logarithm = tape.make(wide.bytes, LOGITS)
            mine = tape.make(wide.bytes, LOGITS)
            tape.drop(by_logarithm)
            return [(wide, mine)]

        tape.node(loss, [logarithms], back)
        tape.drop(logarithms, logits)
        return loss

    def _in_chunks(self, hidden: Value, chunk: int) -> Value:
        """What `linear_loss` does: gradients are made with the loss."""
        net, tape, weight = self._net, self._tape, self._model.output
        w = net.weight(weight)
        rows = min(chunk, net.batch.tokens) * weight.shape[0]
        for_hidden = tape.make(hidden.bytes, LOGITS)
        for_weight = tape.make(weight.elements * WIDE, LOGITS) if w.graded else None
        logits = tape.make(rows * net.c, LOGITS)
        wide = tape.make(rows * WIDE, LOGITS) if net.c != WIDE else tape.hold(logits)
        tape.drop(logits)
        tape.pulse(rows * WIDE, LOGITS)  # logarithms
        narrow = tape.make(rows * net.c, LOGITS) if net.c != WIDE else tape.hold(wide)
        tape.pulse(hidden.bytes // net.batch.tokens * min(chunk, net.batch.tokens), LOGITS)
        if w.graded and net.c != WIDE:
            tape.pulse(min(PIECE, weight.elements) * net.c, LOGITS)
        tape.drop(wide, narrow)
        if for_weight is not None and net.c != WIDE:
            narrow = tape.make(weight.elements * net.c, LOGITS)
            tape.drop(for_weight)
            for_weight = narrow
        loss = tape.make(WIDE, LOGITS)
        kept = [for_hidden, *([] if for_weight is None else [for_weight])]

        def back(upstream: Value) -> list[tuple[Value, Value | None]]:
            return [(hidden, for_hidden), (w, for_weight)]

        tape.node(loss, [], back)
        for value in kept:
            value.refs = 1
        tape.drop(hidden)
        return loss

    def _tensor(self, value: Value) -> Value:
        """Counted among logits."""
        self._tape.ledger.change(value.item, -value.bytes)
        self._tape.ledger.change(LOGITS, value.bytes)
        value.item = LOGITS
        return value
