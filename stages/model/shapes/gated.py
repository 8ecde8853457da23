"""The family of Llama: RMS norms before attention and a gated MLP, rotary positions, no dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.forecast.net import Net
from pipeline.forecast.shapes import BlockShape, ModelShape, Weight
from pipeline.forecast.tape import Value


@dataclass(frozen=True, kw_only=True, eq=False)
class GatedBlock(BlockShape):
    """A block; weights as (outputs, inputs)."""

    heads: int
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    gate: Weight
    up: Weight
    down: Weight
    norms: tuple[Weight, Weight]
    biases: tuple[Weight | None, Weight | None, Weight | None, Weight | None] = (None,) * 4
    """Of q, k, v and o."""
    head_norms: tuple[Weight, Weight] | None = None
    """Of queries and keys, head by head."""

    @property
    def weights(self) -> Sequence[Weight]:  # type: ignore[override]
        """In module order."""
        attention = (self.q, self.k, self.v, self.o, *self.biases, *(self.head_norms or ()))
        every = (*attention, self.gate, self.up, self.down, *self.norms)
        return tuple(weight for weight in every if weight is not None)

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
        with net.module(self.q, self.k, self.v, self.o, *self.biases, *(self.head_norms or ())):
            q, k, v = (
                net.linear(x, weight, bias)
                for weight, bias in zip((self.q, self.k, self.v), self.biases, strict=False)
            )
            if self.head_norms is not None:
                q = net.replaced(q, net.rms_norm(q, self.head_norms[0]))
                k = net.replaced(k, net.rms_norm(k, self.head_norms[1]))
            q = net.replaced(q, net.rotary(q))
            k = net.replaced(k, net.rotary(k))
            mixed = net.attention(q, k, v, self.heads)
            out = net.linear(mixed, self.o, self.biases[3])
            tape.drop(q, k, v, mixed)
            return out

    def _mlp(self, net: Net, x: Value) -> Value:
        tape = net.tape
        with net.module(self.gate, self.up, self.down):
            gate = net.linear(x, self.gate)
            active = net.activation(gate)
            tape.drop(gate)
            up = net.linear(x, self.up)
            gated = net.multiply(active, up)
            tape.drop(active, up)
            out = net.linear(gated, self.down)
            tape.drop(gated)
            return out


@dataclass(frozen=True, kw_only=True)
class GatedModel(ModelShape):
    """Embedding, blocks, norm, head."""

    table: Weight
    norm: Weight
    head: Weight
    """The table itself where they are tied."""

    @property
    def output(self) -> Weight:
        return self.head

    def forward(
        self, net: Net, through: Callable[[Value], Value], loss: Callable[[Value], Value]
    ) -> Value:
        with net.module(self.head):
            with net.module(self.table, self.norm):
                x = through(net.embedding(self.table))
                x = net.replaced(x, net.rms_norm(x, self.norm))
            return loss(x)
