"""Weights as 4 bits hold them: packed, and as the values that come out again."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from pipeline.checkpoint.safetensors_format import CHUNK
from pipeline.contracts.tensors import TensorReader, TensorSpec
from stages.adapter.compat import bitsandbytes
from stages.weights.views import ComputedReader

if TYPE_CHECKING:
    from torch import Tensor

    from stages.adapter.lora import FourBits


BLOCK = 64
"""Elements that share a scale: the paper's block size, and bitsandbytes' default."""

SCALE = 4
"""Bytes of one, in fp32."""


def code_bytes(elements: int) -> int:
    """Bytes of the codes, rounded up to where a scale can begin."""
    return math.ceil(elements / (2 * SCALE)) * SCALE


def packed_bytes(elements: int) -> int:
    """Bytes of a packed weight: 4.5 bits an element, rounded up."""
    return code_bytes(elements) + math.ceil(elements / BLOCK) * SCALE


def codes(values: Tensor, kind: FourBits) -> Tensor:
    """Of flat fp32 values that begin with a block; uint8, two in each."""
    quantised: Tensor = bitsandbytes().functional.quantize_4bit(
        values, blocksize=BLOCK, quant_type=kind, compress_statistics=False
    )[0]
    return quantised.view(-1)


def scales(values: Tensor) -> Tensor:
    """Of the blocks of flat fp32 values that begin with a block; fp32."""
    missing = -values.numel() % BLOCK
    return torch.nn.functional.pad(values, (0, missing)).view(-1, BLOCK).abs().amax(1)


def values(
    codes: Tensor, scales: Tensor, elements: int, kind: FourBits, dtype: torch.dtype
) -> Tensor:
    """What codes and scales stand for, flat. Needs bitsandbytes to be imported."""
    # Flat, as bitsandbytes 0.50 on CPUs takes the scales of rows wrongly that are no whole blocks.
    made: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        codes, scales, BLOCK, kind, [elements], dtype
    )
    return made.view(-1)


def rounded(given: Tensor, kind: FourBits) -> Tensor:
    """What flat fp32 values that begin with a block are after they were in 4 bits."""
    return values(codes(given, kind), scales(given), given.numel(), kind, torch.float32)


def unpack(packed: Tensor, shape: Sequence[int], kind: FourBits, dtype: torch.dtype) -> Tensor:
    """The weight that is packed in a flat contiguous tensor, whatever dtype its bytes are held
    in. Needs bitsandbytes to be imported."""
    elements = math.prod(shape)
    held, border = packed.view(torch.uint8), code_bytes(elements)
    # Copied, as what a strategy gathers need not begin where fp32 may.
    factors = held[border : packed_bytes(elements)].clone().view(torch.float32)
    return values(held[: math.ceil(elements / 2)], factors, elements, kind, dtype).view(shape)


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
