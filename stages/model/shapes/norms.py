"""Norms of the residual stream and of heads."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Self

from pipeline.forecast.layers import layer_norm, wide_norm
from pipeline.forecast.net import Net
from pipeline.forecast.shapes import Weight
from pipeline.forecast.tape import Value
from stages.model.shapes.part import Part


@dataclass(frozen=True, kw_only=True, eq=False)
class Norm(Part):
    """A norm over as many numbers as its weight has."""

    weight: Weight

    @classmethod
    def named(cls, name: str, width: int) -> Self:
        """The norm whose module has that name."""
        return cls(weight=Weight(name=f"{name}.weight", shape=(width,)))

    @abstractmethod
    def forward(self, net: Net, x: Value) -> Value:
        """The normalised `x`, whose reference stays the caller's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RmsNorm(Norm):
    """Scaled in the compute dtype (Zhang & Sennrich 2019)."""

    def forward(self, net: Net, x: Value) -> Value:
        return net.rms_norm(x, self.weight)


@dataclass(frozen=True, kw_only=True, eq=False)
class WideRmsNorm(Norm):
    """Scaled in fp32, by the weight or by one more than it."""

    def forward(self, net: Net, x: Value) -> Value:
        return wide_norm(net, x, self.weight)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerNorm(Norm):
    """With a mean and a bias (Ba et al. 2016)."""

    bias: Weight

    @classmethod
    def named(cls, name: str, width: int) -> Self:
        weight, bias = (Weight(name=f"{name}.{one}", shape=(width,)) for one in ("weight", "bias"))
        return cls(weight=weight, bias=bias)

    def forward(self, net: Net, x: Value) -> Value:
        return layer_norm(net, x, self.weight, self.bias)
