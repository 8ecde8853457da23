"""Weights as 4 bits hold them: packed, and as the values that come out again."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch

from pipeline.artifacts import TensorReader, TensorSpec
from pipeline.state.blocks import CHUNK
from stages.adapter.four_bit_sizes import BLOCK, SCALE, code_bytes, packed_bytes
from stages.adapter.four_bits import codes, rounded, scales
from stages.weights.computed import ComputedReader

if TYPE_CHECKING:
    from torch import Tensor

    from stages.adapter.artifact import FourBits

STEP = CHUNK // torch.float32.itemsize // BLOCK * BLOCK
"""Elements that are quantised at a time: whole blocks."""


class _FourBitReader(ComputedReader):
    """Tensors of `base`, which it closes; some weights in 4 bits."""

    as_stored = False
    """Quantising takes longer than sending what came of it."""

    def __init__(self, base: TensorReader, kind: FourBits) -> None:
        self._base = base
        self._kind: FourBits = kind

    @property
    def others(self) -> TensorReader:
        return self._base

    def close(self) -> None:
        self._base.close()

    def _blocks(self, weight: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """The whole blocks that hold elements [start, stop), a few MiB at a time: first element,
        fp32 values."""
        end = min(math.ceil(stop / BLOCK) * BLOCK, self._base.spec(weight).numel)
        for first in range(start // BLOCK * BLOCK, end, STEP):
            values = torch.empty(min(STEP, end - first), dtype=torch.float32)
            self._base.read_into(weight, first, values)
            yield first, values


class PackedReader(_FourBitReader):
    """Weights of `layers` as bytes, `<layer>.packed` in place of `<layer>.weight`."""

    def __init__(self, base: TensorReader, layers: Collection[str], kind: FourBits) -> None:
        super().__init__(base, kind)
        self._weights = {f"{layer}.packed": f"{layer}.weight" for layer in layers}

    def names(self) -> Collection[str]:
        packed = set(self._weights.values())
        return [*(name for name in self._base.names() if name not in packed), *self._weights]

    def spec(self, name: str) -> TensorSpec:
        if name not in self._weights:
            return self._base.spec(name)
        elements = self._base.spec(self._weights[name]).numel
        return TensorSpec((packed_bytes(elements),), torch.uint8)

    def computes(self, name: str) -> bool:
        return name in self._weights

    def computed(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        weight = self._weights[name]
        border = code_bytes(self._base.spec(weight).numel)
        if start < border:
            yield from self._codes(weight, start, min(stop, border))
        if stop > border:
            yield from self._scales(weight, max(start - border, 0), stop - border)

    def _codes(self, weight: str, start: int, stop: int) -> Iterator[Tensor]:
        done = start
        for first, values in self._blocks(weight, 2 * start, 2 * stop):
            here = codes(values, self._kind)[max(start - first // 2, 0) : stop - first // 2]
            done += here.numel()
            yield here
        if done < stop:  # up to where scales begin
            yield torch.zeros(stop - done, dtype=torch.uint8)

    def _scales(self, weight: str, start: int, stop: int) -> Iterator[Tensor]:
        low, high = start // SCALE * BLOCK, math.ceil(stop / SCALE) * BLOCK
        for first, values in self._blocks(weight, low, high):
            at = first // BLOCK * SCALE
            yield scales(values).view(torch.uint8)[max(start - at, 0) : stop - at]


class RoundedReader(_FourBitReader):
    """All tensors under their own names; weights of `layers` as fp32 values that 4 bits hold."""

    def __init__(self, base: TensorReader, layers: Collection[str], kind: FourBits) -> None:
        super().__init__(base, kind)
        self._rounded = {f"{layer}.weight" for layer in layers}

    def names(self) -> Collection[str]:
        return self._base.names()

    def spec(self, name: str) -> TensorSpec:
        spec = self._base.spec(name)
        return spec._replace(dtype=torch.float32) if self.computes(name) else spec

    def computes(self, name: str) -> bool:
        return name in self._rounded

    def computed(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        for first, values in self._blocks(name, start, stop):
            yield rounded(values, self._kind)[max(start - first, 0) : stop - first]
