"""Feed-forward parts of blocks."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from pipeline.forecast.layers import composed_gelu, split
from pipeline.forecast.net import Net
from pipeline.forecast.tape import Value
from stages.model.shapes.linear import Linear
from stages.model.shapes.part import Part


@dataclass(frozen=True, kw_only=True, eq=False)
class Mlp(Part):
    """What a block computes of each token alone."""

    @abstractmethod
    def forward(self, net: Net, x: Value) -> Value:
        """Of `x`, whose reference stays the caller's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GatedMlp(Mlp):
    """A product of two layers, one behind an activation (Shazeer 2020)."""

    gate: Linear
    up: Linear
    down: Linear

    def forward(self, net: Net, x: Value) -> Value:
        with net.module(*self.own):
            gate = self.gate.forward(net, x)
            active = net.replaced(gate, net.activation(gate))
            up = self.up.forward(net, x)
            gated = net.multiply(active, up)
            net.tape.drop(active, up)
            return net.replaced(gated, self.down.forward(net, gated))


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedMlp(Mlp):
    """The same with both layers as one matrix."""

    both: Linear
    down: Linear

    def forward(self, net: Net, x: Value) -> Value:
        with net.module(*self.own):
            both = self.both.forward(net, x)
            gate, up = split(net, both, (both.bytes // 2, both.bytes // 2))
            net.tape.drop(both)
            active = net.activation(gate)
            gated = net.multiply(up, active)
            net.tape.drop(active, up, gate)
            return net.replaced(gated, self.down.forward(net, gated))


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainMlp(Mlp):
    """Two layers with an activation between them."""

    up: Linear
    down: Linear
    composed: bool = False
    """Whether the activation is written as one operation after another."""

    def forward(self, net: Net, x: Value) -> Value:
        with net.module(*self.own):
            up = self.up.forward(net, x)
            active = composed_gelu(net, up) if self.composed else net.activation(up)
            net.tape.drop(up)
            return net.replaced(active, self.down.forward(net, active))
