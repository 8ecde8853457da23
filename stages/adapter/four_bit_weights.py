"""Weights as 4 bits hold them: packed, and as the values that come out again."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch

from pipeline.artifacts import TensorReader, TensorSpec
from pipeline.state.blocks import CHUNK
from stages.adapter.four_bits import (
    BLOCK,
    SCALE,
    Kind,
    code_bytes,
    codes,
    packed_bytes,
    rounded,
    scales,
)
from stages.weights.view import ReaderView

if TYPE_CHECKING:
    from torch import Tensor

STEP = CHUNK // torch.float32.itemsize // BLOCK * BLOCK
"""Elements that are quantised at a time: whole blocks."""


class _FourBitReader(ReaderView):
    """Tensors of `base`, which it closes; the weights of `layers` in 4 bits."""

    as_stored = False
    """Quantising takes longer than sending what came of it."""

    def __init__(self, base: TensorReader, layers: Collection[str], kind: Kind) -> None:
        super().__init__(base)
        self._layers = layers
        self._kind: Kind = kind

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

    def __init__(self, base: TensorReader, layers: Collection[str], kind: Kind) -> None:
        super().__init__(base, layers, kind)
        self._weights = {f"{layer}.packed": f"{layer}.weight" for layer in layers}

    def names(self) -> Collection[str]:
        packed = set(self._weights.values())
        return [*(name for name in self._base.names() if name not in packed), *self._weights]

    def spec(self, name: str) -> TensorSpec:
        if name not in self._weights:
            return self._base.spec(name)
        elements = self._base.spec(self._weights[name]).numel
        return TensorSpec((packed_bytes(elements),), torch.uint8)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        if name not in self._weights:
            yield from self._base.chunks(name, start, stop)
            return
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

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        if name in self._weights:
            super().read_into(name, start, out)
        else:
            self._base.read_into(name, start, out)


class RoundedReader(_FourBitReader):
    """All tensors under their own names; weights of `layers` as fp32 values that 4 bits hold."""

    def __init__(self, base: TensorReader, layers: Collection[str], kind: Kind) -> None:
        super().__init__(base, layers, kind)
        self._rounded = {f"{layer}.weight" for layer in layers}

    def names(self) -> Collection[str]:
        return self._base.names()

    def spec(self, name: str) -> TensorSpec:
        spec = self._base.spec(name)
        return spec._replace(dtype=torch.float32) if name in self._rounded else spec

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        if name not in self._rounded:
            yield from self._base.chunks(name, start, stop)
            return
        for first, given in self._blocks(name, start, stop):
            yield rounded(given, self._kind)[max(start - first, 0) : stop - first]

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        if name in self._rounded:
            super().read_into(name, start, out)
        else:
            self._base.read_into(name, start, out)
