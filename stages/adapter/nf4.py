"""Weights in 4 bits (NF4 or FP4): packed, and as the values that they stand for."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline import TensorReader, TensorSpec
from pipeline.checkpoint import CHUNK
from stages.adapter.compat import bitsandbytes
from stages.weights.views import ComputedReader

if TYPE_CHECKING:
    from stages.adapter.lora import QuantType


BLOCK = 64
"""Elements that share a scale: the paper's block size, and bitsandbytes' default."""
SCALE = 4
"""Bytes of a scale, in fp32."""
STEP = CHUNK // 4 // torch.float32.itemsize // BLOCK * BLOCK
"""Elements that are quantized at a time: whole blocks, of which copies are made."""


def code_bytes(elements: int) -> int:
    """Bytes of the codes, rounded up to where a scale can begin."""
    return math.ceil(elements / (2 * SCALE)) * SCALE


def packed_bytes(elements: int) -> int:
    """Bytes of a packed weight: 4.5 bits an element, rounded up."""
    return code_bytes(elements) + math.ceil(elements / BLOCK) * SCALE


def codes(values: Tensor, kind: QuantType) -> Tensor:
    """The codes of flat fp32 values that begin with a block; uint8, two in each."""
    quantized: Tensor = bitsandbytes().functional.quantize_4bit(
        values, blocksize=BLOCK, quant_type=kind, compress_statistics=False
    )[0]
    return quantized.view(-1)


def scales(values: Tensor) -> Tensor:
    """The scales of the blocks of flat fp32 values that begin with a block; fp32."""
    whole = values.numel() // BLOCK * BLOCK
    return torch.cat([
        torch.linalg.vector_norm(blocks, torch.inf, dim=1)
        for blocks in (values[:whole].view(-1, BLOCK), values[whole:].view(1, -1))
        if blocks.numel()
    ])  # fmt: skip


def dequantize(
    codes: Tensor, scales: Tensor, elements: int, kind: QuantType, dtype: torch.dtype
) -> Tensor:
    """The values of codes and scales, flat. Needs bitsandbytes to be imported."""
    # Flat, as bitsandbytes 0.50 on CPUs takes the scales of rows wrongly that are no whole blocks.
    made: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        codes, scales, BLOCK, kind, [elements], dtype
    )
    return made.view(-1)


def rounded(values: Tensor, kind: QuantType) -> Tensor:
    """Flat fp32 values that begin with a block, quantized and dequantized."""
    return dequantize(codes(values, kind), scales(values), values.numel(), kind, torch.float32)


def unpack(packed: Tensor, shape: Sequence[int], kind: QuantType, dtype: torch.dtype) -> Tensor:
    """The weight that is packed in a flat contiguous tensor, whatever dtype its bytes are held
    in. Needs bitsandbytes to be imported."""
    elements = math.prod(shape)
    held, border = packed.view(torch.uint8), code_bytes(elements)
    # Copied, as what a strategy gathers need not begin where fp32 may.
    factors = held[border : packed_bytes(elements)].clone().view(torch.float32)
    return dequantize(held[: math.ceil(elements / 2)], factors, elements, kind, dtype).view(shape)


class _QuantizedReader(ComputedReader):
    """Tensors of `base`, which it closes. Some weights are replaced by their quantized values,
    under the names in `names`."""

    as_stored = False
    """Quantizing takes longer than sending its result."""

    def __init__(self, base: TensorReader, names: Mapping[str, str], kind: QuantType) -> None:
        self._base = base
        self._names = names
        self._weights = {made: weight for weight, made in names.items()}
        self._kind: QuantType = kind

    @property
    def others(self) -> TensorReader:
        return self._base

    def names(self) -> Collection[str]:
        return [self._names.get(name, name) for name in self._base.names()]

    def computes(self, name: str) -> bool:
        return name in self._weights

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


class PackedReader(_QuantizedReader):
    """Weights of `layers` as bytes, `<layer>.packed` in place of `<layer>.weight`."""

    def __init__(self, base: TensorReader, layers: Collection[str], kind: QuantType) -> None:
        super().__init__(base, {f"{one}.weight": f"{one}.packed" for one in layers}, kind)

    def spec(self, name: str) -> TensorSpec:
        if not self.computes(name):
            return self._base.spec(name)
        elements = self._base.spec(self._weights[name]).numel
        return TensorSpec((packed_bytes(elements),), torch.uint8)

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


class RoundedReader(_QuantizedReader):
    """All tensors under their own names; weights of `layers` as fp32 values that 4 bits hold."""

    def __init__(self, base: TensorReader, layers: Collection[str], kind: QuantType) -> None:
        super().__init__(base, {f"{one}.weight": f"{one}.weight" for one in layers}, kind)

    def spec(self, name: str) -> TensorSpec:
        spec = self._base.spec(name)
        return spec._replace(dtype=torch.float32) if self.computes(name) else spec

    def computed(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        for first, values in self._blocks(name, start, stop):
            yield rounded(values, self._kind)[max(start - first, 0) : stop - first]
