"""The family of Llama: RMS norms before attention and a gated MLP, rotary positions, no dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from pipeline.forecast.layers import by_head, eager_attention, repeated
from pipeline.forecast.net import WIDE, Net
from pipeline.forecast.shapes import BlockShape, ModelShape, Weight
from pipeline.forecast.tape import Value

Offsets = tuple[Weight | None, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class GatedBlock(BlockShape):
    """A block; matrices as (outputs, inputs)."""

    heads: int
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    gate: Weight
    up: Weight
    down: Weight
    norms: tuple[Weight, Weight]
    offsets: Offsets = (None,) * 4
    """Biases of q, k, v and o."""
    inner_offsets: Offsets = (None,) * 3
    """Biases of gate, up and down."""
    head_norms: tuple[Weight, Weight] | None = None
    """Of queries and keys, head by head."""
    window: int | None = None
    """How many tokens a token sees at most."""
    eager: bool = False
    """Whether attention holds its matrix."""

    @cached_property
    def own(self) -> Sequence[Weight]:
        attention = (self.q, self.k, self.v, self.o, *self.offsets, *(self.head_norms or ()))
        mlp = (self.gate, self.up, self.down, *self.inner_offsets)
        return tuple(weight for weight in (*attention, *mlp, *self.norms) if weight is not None)

    def changed(self, change: Callable[[Weight], Weight]) -> Self:
        def each(weights: Offsets) -> Any:
            return tuple(None if weight is None else change(weight) for weight in weights)

        return replace(
            self,
            q=change(self.q),
            k=change(self.k),
            v=change(self.v),
            o=change(self.o),
            gate=change(self.gate),
            up=change(self.up),
            down=change(self.down),
            norms=each(self.norms),
            offsets=each(self.offsets),
            inner_offsets=each(self.inner_offsets),
            head_norms=None if self.head_norms is None else each(self.head_norms),
        )

    def forward(self, net: Net, x: Value) -> Value:
        tape = net.tape
        with net.module(*self.norms):
            normed = net.rms_norm(x, self.norms[0])
            attended = self._attend(net, normed)
            tape.drop(normed)
            middle = net.add(x, attended)
            tape.drop(attended)
            normed = net.rms_norm(middle, self.norms[1])
            mixed = self._mlp(net, normed)
            tape.drop(normed)
            out = net.add(middle, mixed)
            tape.drop(middle, mixed)
        return out

    def _attend(self, net: Net, x: Value) -> Value:
        tape = net.tape
        with net.module(self.q, self.k, self.v, self.o, *self.offsets, *(self.head_norms or ())):
            inputs = zip((self.q, self.k, self.v), self.offsets, strict=False)
            q, k, v = (net.linear(x, weight, offset) for weight, offset in inputs)
            if self.head_norms is not None:
                q = net.replaced(q, net.rms_norm(q, self.head_norms[0]))
                k = net.replaced(k, net.rms_norm(k, self.head_norms[1]))
            q = net.replaced(q, net.rotary(q))
            k = net.replaced(k, net.rotary(k))
            masked = self.eager or masks(net, self.window)
            if masked:  # with one, heads do not share keys and values
                times = self.q.shape[0] // self.k.shape[0]
                k = net.replaced(k, repeated(net, k, times, self.heads // times))
                v = net.replaced(v, repeated(net, v, times, self.heads // times))
            if self.eager:
                v = v if times > 1 else net.replaced(v, by_head(net, v))
                mixed = eager_attention(net, q, k, v, self.heads)
            else:
                mixed = net.attention(q, k, v, self.heads, masked=masked)
            out = net.linear(mixed, self.o, self.offsets[3])
            tape.drop(q, k, v, mixed)
            return out

    def _mlp(self, net: Net, x: Value) -> Value:
        tape = net.tape
        for_gate, for_up, for_down = self.inner_offsets
        with net.module(self.gate, self.up, self.down, *self.inner_offsets):
            gate = net.linear(x, self.gate, for_gate)
            active = net.activation(gate)
            tape.drop(gate)
            up = net.linear(x, self.up, for_up)
            gated = net.multiply(active, up)
            tape.drop(active, up)
            out = net.linear(gated, self.down, for_down)
            tape.drop(gated)
            return out


def masks(net: Net, window: int | None) -> bool:
    """Whether attention needs a mask: for documents that do not see each other, or a window."""
    return net.batch.packed or (window is not None and net.batch.length >= window)


def mask_bytes(net: Net, *, eager: bool) -> int:
    """Of what the model makes of it for all blocks: a number for each pair of tokens that is added
    to a matrix, or a byte, once for all samples that are one document each."""
    if eager:
        return net.batch.tokens * net.batch.length * net.c
    return net.batch.positions * net.batch.length


@dataclass(frozen=True, kw_only=True)
class GatedModel(ModelShape):
    """Embedding, blocks, norm, head."""

    blocks: Sequence[GatedBlock]
    table: Weight
    norm: Weight
    head: Weight
    """The table itself where they are tied."""
    rotary: int
    """Sines and cosines of a position, each."""

    def changed(self, change: Callable[[Weight], Weight]) -> Self:
        new = {weight: change(weight) for weight in self.root}
        return replace(
            self,
            root=tuple(new.values()),
            blocks=[block.changed(change) for block in self.blocks],
            table=new[self.table],
            norm=new[self.norm],
            head=new[self.head],
        )

    @property
    def output(self) -> Weight:
        return self.head

    def forward(
        self, net: Net, through: Callable[[Value], Value], loss: Callable[[Value], Value]
    ) -> Value:
        with net.module(self.head):
            with net.module(self.table, self.norm):
                x = net.embedding(self.table)
                embedded = net.tape.hold(x)  # a variable, until the method is through
                angles = self._angles(net)
                mask = self._mask(net)
                x = through(x)
                x = net.replaced(x, net.rms_norm(x, self.norm))
                net.tape.drop(embedded, angles, mask)
            return loss(x)

    def _mask(self, net: Net) -> Value:
        """Which tokens see which, as bytes, where that is not all before, or as numbers where a
        matrix is there to be added to; blocks that are computed again keep it for backward."""
        eager = any(block.eager for block in self.blocks)
        masked = eager or any(masks(net, block.window) for block in self.blocks)
        mask = net.tape.make(mask_bytes(net, eager=eager) if masked else 0)
        if self.recomputed is not None:
            kept = net.tape.hold(mask)
            net.tape.then(lambda: net.tape.drop(kept))
        return mask

    def _angles(self, net: Net) -> Value:
        """Sines and cosines of all positions, which all blocks keep for backward."""
        numbers = 2 * net.batch.positions * self.rotary
        net.tape.pulse(numbers * WIDE)
        angles = net.tensor(numbers, graded=False)
        kept = net.tape.hold(angles)
        net.tape.then(lambda: net.tape.drop(kept))
        return angles
