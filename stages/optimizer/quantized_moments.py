"""Storage of AdamW's moments: tensors of one dtype, or blocks of 8-bit codes.

Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization: each block of values is divided
by its largest magnitude, its scale, and rounded to the nearest values of a code book.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline import StateCodec
from stages.optimizer import torchao_compat

MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCK = 256
"""Elements of a block, as in bitsandbytes and torchao."""
SMALLEST = 4096
"""Elements; smaller parameters have no blocks, as in bitsandbytes and torchao."""
LEAST_SCALE = 1e-12
"""Lower bound of scales, as in torchao."""
AT_A_TIME = 1 << 22
"""Elements that are encoded exactly at a time: encoding needs about ten times their memory."""


class CodeBook:
    """The 256 dynamic values of bitsandbytes and torchao, ascending, from 0 or from -0.993 to 1."""

    def __init__(self, *, signed: bool) -> None:
        quantizers = torchao_compat.quantizers()
        self.values: tuple[float, ...] = tuple(quantizers.create_dynamic_map(signed))
        self._nearest = quantizers.quantize_8bit_with_qmap

    def table(self, device: torch.device) -> Tensor:
        """The values as an fp32 tensor of shape (256,), which the other methods take."""
        return torch.tensor(self.values, dtype=torch.float32, device=device)

    def encode(
        self, blocks: Tensor, table: Tensor, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """uint8 codes (blocks, BLOCK) and fp32 scales (blocks,) of fp32 values (blocks, BLOCK)."""
        scales = blocks.abs().amax(-1).clip(LEAST_SCALE) if scales is None else scales
        return self._nearest(blocks / scales.view(-1, 1), table), scales

    def decode(self, codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
        """fp32 values (blocks, BLOCK) of codes and scales."""
        return table[codes.int()] * scales.view(-1, 1)

    def encode_exactly(self, blocks: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Encode values so that results of `decode` are decoded to the same bits again. Blocks
        whose largest value is negative, so 0.993 of its scale, are tried with larger scales."""
        codes, scales = self.encode(blocks, table)
        left = (self.decode(codes, scales, table) != blocks).any(-1).nonzero().view(-1)
        for candidates in self._larger_scales(blocks.abs().amax(-1)):
            if not left.numel():
                break
            trial = self.encode(blocks[left], table, candidates[left])
            wrong = (self.decode(*trial, table) != blocks[left]).any(-1)
            codes[left[~wrong]], scales[left[~wrong]] = (one[~wrong] for one in trial)
            left = left[wrong]
        return codes, scales

    def _larger_scales(self, largest: Tensor) -> Iterator[Tensor]:
        """Scales (blocks,) whose least value is -`largest`, up to rounding."""
        if self.values[0] < 0:
            below = above = largest / -self.values[0]
            yield below
            for _ in range(2):
                below = torch.nextafter(below, torch.zeros_like(below))
                above = torch.nextafter(above, torch.full_like(above, torch.inf))
                yield from (below, above)


class PlainMoments(StateCodec):
    """Flat tensors of one dtype; None is the parameter's dtype.

    An update decodes the moments of each part, changes and encodes them.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype

    def start(self, parameter: Tensor, count: int) -> dict[str, Tensor]:
        dtype = self._dtype or parameter.dtype
        return {name: torch.zeros(count, dtype=dtype, device=parameter.device) for name in MOMENTS}

    def unpack(self, state: Mapping[str, Any], moment: str, start: int, stop: int) -> Tensor:
        values: Tensor = state[moment]
        return values[start:stop]

    def pack(self, state: Mapping[str, Any], moment: str, values: Tensor) -> None:
        """Do nothing: `unpack` returns views."""

    def parts(
        self, state: Mapping[str, Tensor], count: int
    ) -> Iterator[tuple[int, int, Mapping[str, Tensor]]]:
        """(start, stop, state) of each part of `count` elements that is stored alike."""
        yield 0, count, {name: state[name] for name in MOMENTS}

    def tables(self, device: torch.device) -> Mapping[str, Tensor]:
        """Constants for `decode` and `encode` on a device, by moment."""
        return {}

    def decode(
        self, state: Mapping[str, Tensor], moment: str, tables: Mapping[str, Tensor]
    ) -> Tensor:
        """A flat moment of a part. The update may overwrite it and then calls `encode`."""
        return state[moment]

    def encode(
        self, state: Mapping[str, Tensor], moment: str, values: Tensor, tables: Mapping[str, Tensor]
    ) -> None:
        """Store `values`, which are a result of `decode` that the update has overwritten."""


class BlockwiseMoments(PlainMoments):
    """Codes and a scale for each block; fp32 for small parameters and after the last block."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        first, second = MOMENTS
        self._books = {first: CodeBook(signed=True), second: CodeBook(signed=False)}
        self._tables: dict[torch.device, dict[str, Tensor]] = {}

    def start(self, parameter: Tensor, count: int) -> dict[str, Tensor]:
        whole, device = _in_blocks(count), parameter.device
        state = super().start(parameter, count - whole) if whole < count else {}
        for moment in MOMENTS if whole else ():
            state[f"{moment}.codes"] = torch.zeros(whole, dtype=torch.uint8, device=device)
            state[f"{moment}.scales"] = torch.zeros(whole // BLOCK, device=device)
        return state

    def parts(
        self, state: Mapping[str, Tensor], count: int
    ) -> Iterator[tuple[int, int, Mapping[str, Tensor]]]:
        whole = _in_blocks(count)
        if whole:
            yield 0, whole, {key: value for key, value in state.items() if "." in key}
        if whole < count:
            yield whole, count, {name: state[name] for name in MOMENTS}

    def unpack(self, state: Mapping[str, Any], moment: str, start: int, stop: int) -> Tensor:
        whole, found = _stored_in_blocks(state, moment), []
        if start < whole:
            first, last = start // BLOCK, -(-min(stop, whole) // BLOCK)
            codes, scales = (stored[first:last] for stored in _blocks(state, moment))
            table = self.tables(scales.device)[moment]
            values = self._books[moment].decode(codes, scales, table).view(-1)
            # + 0.0: with a scale of 0, a negative code is decoded to -0.0
            found.append(values[start - first * BLOCK : min(stop, whole) - first * BLOCK] + 0.0)
        if stop > whole:
            found.append(super().unpack(state, moment, max(start - whole, 0), stop - whole))
        return torch.cat(found)

    def pack(self, state: Mapping[str, Any], moment: str, values: Tensor) -> None:
        whole = _stored_in_blocks(state, moment)
        if whole < len(values):
            state[moment].copy_(values[whole:])
        if whole:
            codes, scales = _blocks(state, moment)
            table = self.tables(scales.device)[moment]
            blocks = values[:whole].view(-1, BLOCK)
            for first in range(0, len(scales), AT_A_TIME // BLOCK):
                part = slice(first, first + AT_A_TIME // BLOCK)
                codes[part], scales[part] = self._books[moment].encode_exactly(blocks[part], table)

    def tables(self, device: torch.device) -> Mapping[str, Tensor]:
        if device not in self._tables:
            self._tables[device] = {m: book.table(device) for m, book in self._books.items()}
        return self._tables[device]

    def decode(
        self, state: Mapping[str, Tensor], moment: str, tables: Mapping[str, Tensor]
    ) -> Tensor:
        if moment in state:
            return state[moment]
        return self._books[moment].decode(*_blocks(state, moment), tables[moment]).view(-1)

    def encode(
        self, state: Mapping[str, Tensor], moment: str, values: Tensor, tables: Mapping[str, Tensor]
    ) -> None:
        if moment not in state:
            codes, scales = _blocks(state, moment)
            new = self._books[moment].encode(values.view(-1, BLOCK), tables[moment])
            codes.copy_(new[0])
            scales.copy_(new[1])


def _in_blocks(count: int) -> int:
    """Number of a parameter's `count` elements that are stored in blocks."""
    return 0 if count < SMALLEST else count - count % BLOCK


def _stored_in_blocks(state: Mapping[str, Any], moment: str) -> int:
    return BLOCK * len(state.get(f"{moment}.scales", ()))


def _blocks(state: Mapping[str, Tensor], moment: str) -> tuple[Tensor, Tensor]:
    """Views of the stored codes (blocks, BLOCK) and scales (blocks,)."""
    return state[f"{moment}.codes"].view(-1, BLOCK), state[f"{moment}.scales"]


def moment_codec(moments: str) -> PlainMoments:
    """The codec for the field `moments` of optimizer.adamw. Raises StageError without torchao."""
    if moments == "8bit":
        return BlockwiseMoments()
    return PlainMoments({"fp32": torch.float32, "bf16": torch.bfloat16, "master": None}[moments])
