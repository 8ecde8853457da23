"""Linear layers."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.forecast.net import Net
from pipeline.forecast.shapes import Weight
from pipeline.forecast.tape import Value
from stages.model.shapes.part import Part


@dataclass(frozen=True, kw_only=True, eq=False)
class Linear(Part):
    """A matrix, and a bias of its outputs."""

    weight: Weight
    bias: Weight | None = None

    def forward(self, net: Net, x: Value) -> Value:
        """The product with `x`, whose reference stays the caller's."""
        return net.linear(x, self.weight, self.bias)


def transposed(name: str, outputs: int, inputs: int) -> Linear:
    """The layer of transformers' class Conv1D whose module has that name."""
    return Linear(
        weight=Weight(name=f"{name}.weight", shape=(inputs, outputs), transposed=True),
        bias=Weight(name=f"{name}.bias", shape=(outputs,)),
    )


def linear(name: str, outputs: int, inputs: int, *, bias: bool = False) -> Linear:
    """The layer whose module has that name."""
    return Linear(
        weight=Weight(name=f"{name}.weight", shape=(outputs, inputs)),
        bias=Weight(name=f"{name}.bias", shape=(outputs,)) if bias else None,
    )
