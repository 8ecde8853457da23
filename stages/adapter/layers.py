"""A weight with a low-rank update: names and shapes, in the module and in peft's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stages.adapter.compat import ADAPTER, PREFIX, name_in_file


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A linear layer, or the stacked weights of a layer's experts, with an update."""

    name: str
    """Name in the model without updates: of the linear layer's module, or of the stacked weights'
    parameter."""
    rank: int
    """Rank of the update, for each expert."""
    scaling: float
    transposed: bool
    """Whether a weight is (inputs, outputs), as GPT-2's are."""
    inputs: int
    outputs: int
    dora: bool = False
    experts: int | None = None
    """Number of stacked weights; None for a linear layer."""
    nested: int = 0
    """Number of updates of the same module that peft puts around this one."""

    @property
    def down(self) -> str:
        """Name of the tensor A, shape (rank, inputs), or (experts, rank, inputs)."""
        return self._part("lora_A")

    @property
    def up(self) -> str:
        """Name of the tensor B, shape (outputs, rank), or (experts, outputs, rank)."""
        return self._part("lora_B")

    @property
    def magnitude(self) -> str:
        """Name of the lengths of the rows, shape (outputs,), with DoRA."""
        return f"{self.name}.lora_magnitude_vector.{ADAPTER}.weight"

    @property
    def weight(self) -> str:
        """Name of the weight that is updated, in the model without updates."""
        return f"{self.name}.weight" if self.experts is None else self.name

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of the update's tensors."""
        stack = () if self.experts is None else (self.experts,)
        shapes: dict[str, tuple[int, ...]] = {
            self.down: (*stack, self.rank, self.inputs),
            self.up: (*stack, self.outputs, self.rank),
        }
        return {**shapes, self.magnitude: (self.outputs,)} if self.dora else shapes

    @property
    def in_file(self) -> Mapping[str, str]:
        """Name -> name in peft's file of the update's tensors."""
        if self.experts is None:
            return {name: name_in_file(name) for name in self.shapes}
        # peft wraps the module of the experts once for each stacked weight, the last one outermost,
        # and names none of them.
        owner = PREFIX + self.name.rpartition(".")[0] + ".base_layer" * self.nested
        return {self.down: f"{owner}.lora_A.weight", self.up: f"{owner}.lora_B.weight"}

    def _part(self, part: str) -> str:
        if self.experts is None:
            return f"{self.name}.{part}.{ADAPTER}.weight"
        owner, _, leaf = self.name.rpartition(".")
        return f"{owner}.{part}.{leaf}"
