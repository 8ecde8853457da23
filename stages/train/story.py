"""A training step as a story of memory."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pipeline.artifacts import Precision
from pipeline.errors import StageError
from pipeline.forecast.net import WIDE, Batch, Kept, Net
from pipeline.forecast.phases import BACKWARD, FORWARD, LOAD, RESUME, SAVE, UPDATE
from pipeline.forecast.placement import Copies, Placement
from pipeline.forecast.result import Step
from pipeline.forecast.shapes import BlockShape, ModelShape, OptimizerShape, Recomputed, SampleShape
from pipeline.forecast.site import Site
from pipeline.forecast.sizes import BYTES
from pipeline.forecast.tape import ACTIVATIONS, GRADIENTS, Tape, Value
from stages.train.refusals import CHANGED_LOGITS, HINT
from stages.train.work import work

if TYPE_CHECKING:
    from stages.train.causal_lm import TrainCausalLm

LOGITS = "logits and loss"
OFFLOADED = "offloaded activations"
PIECE = 1 << 24
"""Elements of the product that `linear_loss` makes at a time."""


def tell(
    config: TrainCausalLm,
    site: Site,
    model: ModelShape,
    data: SampleShape,
    precision: Precision,
    optimizer: OptimizerShape,
    placement: Placement,
) -> Step:
    """Two steps on the site's ledger, the second with optimizer state from the start; what a step
    is made of. Raises StageError for a loss in chunks of logits that the model changes."""
    if config.loss_chunk_size is not None and model.changes_logits:
        raise StageError(CHANGED_LOGITS, hint=HINT)
    ledger = site.ledger
    size = config.microbatch_size(site.ranks)
    most = -(-config.global_batch_size // site.ranks)
    count = -(-most // size)
    batch = Batch(
        samples=min(size, most),
        length=data.length,
        packed=data.packed,
        mask=None if site.device == "cpu" else 1,  # torch's kernels for GPUs keep a bool
    )
    ledger.phase(LOAD)
    placement.load()
    story = Story(model, placement, batch, BYTES[precision.compute], config.loss_chunk_size)
    made = offloaded = 0
    for _ in range(2):
        # Further micro-batches are like the last but one.
        for number in range(min(count, 3)):
            before = ledger.taken, story.offloaded
            story.microbatch(last=number == min(count, 3) - 1)
            made, offloaded = ledger.taken - before[0], story.offloaded - before[1]
        ledger.phase(UPDATE)
        placement.step()
    story.explain()
    for phase in (SAVE, RESUME):  # which hold what there is between two steps
        ledger.phase(phase)
    return Step(
        microbatches=count,
        samples=config.global_batch_size,
        tokens=config.global_batch_size * data.length,
        length=config.length(),
        work=work(model, data, most),
        moved=2 * made * most // batch.samples + placement.updated,
        copies=Copies(up=offloaded * most // batch.samples, down=offloaded * most // batch.samples),
    )


class Story:
    """Micro-batches of one rank."""

    def __init__(
        self,
        model: ModelShape,
        placement: Placement,
        batch: Batch,
        compute: int,
        chunk: int | None,
    ) -> None:
        self._model = model
        self._tape = Tape(placement.ledger)
        self._net = Net(self._tape, placement, batch, compute)
        self._placement = placement
        self._chunk = chunk
        self._kept = 0
        """Bytes that a block's forward leaves."""
        self.offloaded = 0
        """Bytes of activations that went to host memory, and back."""

    def explain(self) -> None:
        """Say how what it takes comes about."""
        model, net, tell = self._model, self._net, self._tape.ledger.explain
        tokens, blocks = net.batch.tokens, len(model.blocks)
        tell(
            ACTIVATIONS,
            f"{tokens} tokens; of {blocks} blocks each keeps {self._kept / tokens:.6g} bytes a "
            "token for backward; and what is being computed",
        )
        tell(GRADIENTS, "of what backward has come to")
        tell(OFFLOADED, "inputs of blocks that are computed again")
        if self._chunk is None:
            rows = f"{tokens} tokens x {model.vocabulary} x"
            tell(LOGITS, f"{rows} ({net.c} bytes of logits, 4 in fp32, 4 of logarithms)")
        else:
            rows = f"{min(self._chunk, tokens)} tokens x {model.vocabulary}"
            tell(LOGITS, f"{rows}, and gradients of the head: {model.output.elements} x 4 bytes")

    def microbatch(self, *, last: bool) -> None:
        """Forward, loss and backward."""
        placement, tape = self._placement, self._tape
        tape.ledger.phase(FORWARD)
        placement.begin(last=last)
        placement.before_forward(None)
        tape.then(lambda: placement.after_backward(None))
        out = self._model.forward(self._net, self._blocks, self._output)
        placement.after_forward(None)
        tape.then(placement.backward_at_output)
        loss = self._in_full(out) if self._chunk is None else out
        tape.ledger.phase(BACKWARD)
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
        before = tape.ledger.now(ACTIVATIONS)
        if again is not None and place % again.every == 0:
            out = self._recomputed(block, x, again)
        else:
            out = block.forward(self._net, x)
        self._kept = max(tape.ledger.now(ACTIVATIONS) - before, self._kept if place else 0)
        tape.then(lambda: placement.before_backward(place))
        placement.after_forward(place)
        return out

    def _recomputed(self, block: BlockShape, x: Value, how: Recomputed) -> Value:
        net, tape = self._net, self._tape
        kept = deque[Value]()
        net.kept = Kept(
            products=how.keep == "matmuls", attention=how.keep != "nothing", filling=kept
        )
        tape.recording = False
        out = block.forward(net, x)
        tape.recording = True
        net.kept = Kept()
        if how.offload:
            tape.ledger.change(OFFLOADED, x.bytes, "host")
            self.offloaded += x.bytes

        def back(upstream: Value) -> list[tuple[Value, Value | None]]:
            if how.offload:
                inner = net.tensor(x.bytes // x.element, x.element, graded=x.graded)
                tape.ledger.change(OFFLOADED, -x.bytes, "host")
            else:
                inner = Value(0, GRADIENTS, graded=x.graded, element=x.element)
                inner.bytes = x.bytes
                tape.hold(inner)
            start = tape.mark()
            net.kept = Kept(
                products=how.keep == "matmuls", attention=how.keep != "nothing", using=kept
            )
            result = block.forward(net, inner)
            net.kept = Kept()
            tape.accumulate(result, upstream)
            tape.drop(result)
            tape.run_back(start)
            if how.offload:
                tape.drop(inner)
            return [(x, inner.gradient)]

        return tape.node(out, [] if how.offload else [x], back, takes=True)

    def _output(self, hidden: Value) -> Value:
        """Logits, or the loss itself where it is computed in chunks."""
        if self._chunk is not None:
            return self._in_chunks(hidden, self._chunk)
        logits = self._tensor(self._net.linear(hidden, self._model.output))
        self._tape.drop(hidden)
        return self._model.finished(self._net, logits)

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
