"""Numbers in fewer bits (Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization).

Blocks of them are divided by their largest, and each is rounded to the nearest of few values, its
code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from stages.optimizer import torchao_compat

LEAST = 1e-12
"""Largest value of a block below which its scale does not fall, as in torchao."""

AT_A_TIME = 1 << 22
"""Elements that are encoded exactly at a time: encoding needs some ten times their memory."""


class Code(ABC):
    """How the values of a block become codes. A block's values are its codes' times its scale."""

    block: int
    """Values of a block."""
    ends: tuple[float, ...]
    """Magnitudes of what the largest value of a block can become; the first that of a positive."""
    stored: torch.dtype
    packed: int = 1
    """Codes in one stored element."""

    def table(self, device: torch.device) -> Tensor:
        """What the functions below need on the device of the codes."""
        return torch.empty(0, device=device)

    @abstractmethod
    def quantise(self, scaled: Tensor, table: Tensor) -> Tensor:
        """Values between the ends, shape (blocks, block) -> codes, (blocks, block / packed)."""

    @abstractmethod
    def values(self, codes: Tensor, table: Tensor) -> Tensor:
        """Codes, (blocks, block / packed) -> fp32 values between the ends, (blocks, block)."""

    def encode(self, blocks: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 values (blocks, block) -> codes and scales (blocks,)."""
        scales = blocks.abs().amax(-1).clip(LEAST) / self.ends[0]
        return self.quantise(blocks / scales.view(-1, 1), table), scales

    def decode(self, codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
        """Codes and scales -> fp32 values (blocks, block)."""
        return self.values(codes, table) * scales.view(-1, 1)

    def encode_again(self, blocks: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """As `encode`, but what was decoded before is decoded to the same bits again.

        The largest value of a block need not have the largest code: where a code has no -1, a
        largest value that is negative has become less. So each scale that can have been is tried.
        """
        codes, scales = self.encode(blocks, table)
        left = self._inexact(blocks, codes, scales, table)
        for trial in self._scales(blocks.abs().amax(-1)):
            if not left.numel():
                break
            some, scale = blocks[left], trial[left]
            again = self.quantise(some / scale.view(-1, 1), table)
            wrong = self._inexact(some, again, scale, table)
            right = torch.ones(left.numel(), dtype=torch.bool, device=left.device)
            right[wrong] = False
            codes[left[right]], scales[left[right]] = again[right], scale[right]
            left = left[wrong]
        return codes, scales

    def _inexact(self, blocks: Tensor, codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
        """Numbers of the blocks that are not decoded as they were."""
        return (self.decode(codes, scales, table) != blocks).any(-1).nonzero().view(-1)

    def _scales(self, largest: Tensor) -> Iterator[Tensor]:
        """Those that can have made `largest`, up to rounding, of any end; the least one too."""
        for end in self.ends:
            below = above = largest / end
            yield below
            for _ in range(2):
                below = torch.nextafter(below, torch.zeros_like(below))
                above = torch.nextafter(above, torch.full_like(above, torch.inf))
                yield below
                yield above
        yield torch.full_like(largest, LEAST / self.ends[0])


class Book(Code):
    """Codes number the values of a book, in ascending order."""

    stored = torch.uint8

    def __init__(self, values: tuple[float, ...]) -> None:
        self._values = values
        self.ends = (values[-1], -values[0]) if values[0] < 0 else (values[-1],)

    def table(self, device: torch.device) -> Tensor:
        return torch.tensor(self._values, dtype=torch.float32, device=device)


class Book8(Book):
    """Dynamic 8-bit values in blocks of 256, as in bitsandbytes and torchao."""

    block = 256

    def __init__(self, *, signed: bool) -> None:
        quantizers = torchao_compat.quantizers()
        super().__init__(tuple(quantizers.create_dynamic_map(signed)))
        self._nearest = quantizers.quantize_8bit_with_qmap

    def quantise(self, scaled: Tensor, table: Tensor) -> Tensor:
        codes: Tensor = self._nearest(scaled, table)
        return codes

    def values(self, codes: Tensor, table: Tensor) -> Tensor:
        return table[codes.int()]


class Book4(Book):
    """4-bit values in blocks of 128, two to a byte (Li et al. 2023, Memory Efficient Optimizers
    with 4-bit States)."""

    block, packed = 128, 2

    def __init__(self, *, signed: bool) -> None:
        books = torchao_compat.four_bit()
        super().__init__(books.get_qmap_signed() if signed else books.get_qmap_unsigned())
        self._nearest = torchao_compat.quantizers().quantize_4bit_with_qmap

    def quantise(self, scaled: Tensor, table: Tensor) -> Tensor:
        codes: Tensor = self._nearest(scaled, table)
        return (codes[..., ::2] << 4) | codes[..., 1::2]

    def values(self, codes: Tensor, table: Tensor) -> Tensor:
        pairs = torch.stack([codes >> 4, codes & 0b1111], dim=-1).flatten(-2)
        return table[pairs.int()]


class Fp8(Code):
    """Floats of 8 bits (e4m3) in blocks of 256."""

    block, stored = 256, torch.float8_e4m3fn
    ends = (torch.finfo(torch.float8_e4m3fn).max,)

    def quantise(self, scaled: Tensor, table: Tensor) -> Tensor:
        return scaled.to(self.stored)

    def values(self, codes: Tensor, table: Tensor) -> Tensor:
        return codes.float()
