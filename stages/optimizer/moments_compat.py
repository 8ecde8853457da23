"""Storage of AdamW's moments: tensors of one dtype, or blocks of 8-bit codes.

Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization: each block of values is divided
by its largest magnitude, its scale, and rounded to the nearest values of a code book. Code books
and the update rule are in private modules of torchao 0.18.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pipeline import StateCodec
from pipeline.utils import optional

MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCK = 256
"""Elements of a block, as in bitsandbytes and torchao."""
SMALLEST = 4096
"""Elements; smaller parameters have no blocks, as in bitsandbytes and torchao."""
LEAST_SCALE = 1e-12
"""Lower bound of scales, as in torchao."""
AT_A_TIME = 1 << 22
"""Elements that are encoded exactly at a time: encoding needs about ten times their memory."""


def torchao(name: str) -> ModuleType:
    """A module of torchao.optim: `adam` has `single_param_adam`, the update rule, and `quant_utils`
    has `create_dynamic_map` and `quantize_8bit_with_qmap`. Raises StageError without torchao."""
    with optional("this optimizer needs torchao", hint="pip install 'pipetrain[torchao]'"):
        return importlib.import_module(f"torchao.optim.{name}")


class CodeBook:
    """The 256 dynamic values of bitsandbytes and torchao, ascending, from 0 or from -0.993 to 1."""

    def __init__(self, *, signed: bool) -> None:
        quantizers = torchao("quant_utils")
        self.values: tuple[float, ...] = tuple(quantizers.create_dynamic_map(signed))
        self._nearest = quantizers.quantize_8bit_with_qmap

    def encode(
        self, blocks: Tensor, table: Tensor, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """uint8 codes (blocks, BLOCK) and fp32 scales (blocks,) of fp32 values (blocks, BLOCK).
        `table` are the book's values as an fp32 tensor (256,)."""
        scales = blocks.abs().amax(-1).clip(LEAST_SCALE) if scales is None else scales
        return self._nearest(blocks / scales.view(-1, 1), table), scales

    def decode(self, codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
        """fp32 values (blocks, BLOCK) of codes and scales."""
        return table[codes.int()] * scales.view(-1, 1)

    def encode_exactly(self, blocks: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Encode values so that results of `decode` are decoded to the same bits again. Blocks
        whose largest value is negative, so 0.993 of its scale, are tried with larger scales."""
        codes, scales = self.encode(blocks, table)
        if self.values[0] >= 0:
            return codes, scales
        left = (self.decode(codes, scales, table) != blocks).any(-1).nonzero().view(-1)
        # Scales by which the least code is decoded to the block's largest value, up to rounding.
        below = above = blocks.abs().amax(-1) / -self.values[0]
        candidates = [below]
        for _ in range(2):
            below = torch.nextafter(below, torch.zeros_like(below))
            above = torch.nextafter(above, torch.full_like(above, torch.inf))
            candidates += [below, above]
        for larger in candidates:
            if not left.numel():
                break
            trial = self.encode(blocks[left], table, larger[left])
            wrong = (self.decode(*trial, table) != blocks[left]).any(-1)
            codes[left[~wrong]], scales[left[~wrong]] = (one[~wrong] for one in trial)
            left = left[wrong]
        return codes, scales


class MomentCodec(StateCodec):
    """The codec for the field `moments` of optimizer.adamw: flat tensors of one dtype, by default
    the parameter's own; with `8bit`, codes and a scale for each block instead, but for small
    parameters and what is left after the last block. Raises StageError without torchao. An update
    decodes the moments of each part, changes and encodes them."""

    def __init__(self, moments: str) -> None:
        dtypes = {"fp32": torch.float32, "8bit": torch.float32, "bf16": torch.bfloat16}
        self._dtype = dtypes.get(moments)
        self._books: dict[str, CodeBook] = {}
        if moments == "8bit":
            first, second = MOMENTS
            self._books = {first: CodeBook(signed=True), second: CodeBook(signed=False)}
        self._tables: dict[torch.device, dict[str, Tensor]] = {}

    def start(self, parameter: Tensor, count: int) -> dict[str, Tensor]:
        device, dtype = parameter.device, self._dtype or parameter.dtype
        whole = count - count % BLOCK if self._books and count >= SMALLEST else 0
        state = {}
        for moment in MOMENTS:
            if whole:
                state[f"{moment}.codes"] = torch.zeros(whole, dtype=torch.uint8, device=device)
                state[f"{moment}.scales"] = torch.zeros(whole // BLOCK, device=device)
            if whole < count or not whole:
                state[moment] = torch.zeros(count - whole, dtype=dtype, device=device)
        return state

    def unpack(self, state: Mapping[str, Any], moment: str, start: int, stop: int) -> Tensor:
        whole, found = _in_blocks(state, moment), []
        if start < whole:
            first, last = start // BLOCK, -(-min(stop, whole) // BLOCK)
            codes, scales = (stored[first:last] for stored in _blocks(state, moment))
            table = self.tables(scales.device)[f"{moment}.table"]
            values = self._books[moment].decode(codes, scales, table).view(-1)
            # + 0.0: with a scale of 0, a negative code is decoded to -0.0
            found.append(values[start - first * BLOCK : min(stop, whole) - first * BLOCK] + 0.0)
        if stop > whole or not whole:
            found.append(state[moment][max(start - whole, 0) : stop - whole])
        return found[0] if len(found) == 1 else torch.cat(found)

    def pack(self, state: Mapping[str, Any], moment: str, values: Tensor) -> None:
        """Encode what `unpack` has decoded; a tensor of another dtype is its own storage."""
        whole = _in_blocks(state, moment)
        if whole and whole < len(values):
            state[moment].copy_(values[whole:])
        if whole:
            codes, scales = _blocks(state, moment)
            table = self.tables(scales.device)[f"{moment}.table"]
            blocks = values[:whole].view(-1, BLOCK)
            for first in range(0, len(scales), AT_A_TIME // BLOCK):
                part = slice(first, first + AT_A_TIME // BLOCK)
                codes[part], scales[part] = self._books[moment].encode_exactly(blocks[part], table)

    def parts(
        self, state: Mapping[str, Tensor], count: int
    ) -> Iterator[tuple[int, int, Mapping[str, Tensor]]]:
        """(start, stop, state) of each part of `count` elements that is stored alike, the state of
        blocks with their `tables`."""
        whole = _in_blocks(state, MOMENTS[0])
        if whole:
            blocks = {key: value for key, value in state.items() if "." in key}
            yield 0, whole, blocks | self.tables(state[f"{MOMENTS[0]}.scales"].device)
        if whole < count:
            yield whole, count, {name: state[name] for name in MOMENTS}

    def tables(self, device: torch.device) -> dict[str, Tensor]:
        """Constants for `decode` and `encode` of blocks on a device."""
        if device not in self._tables:
            self._tables[device] = {
                f"{moment}.table": torch.tensor(book.values, dtype=torch.float32, device=device)
                for moment, book in self._books.items()
            }
        return self._tables[device]

    def decode(self, state: Mapping[str, Tensor], moment: str) -> Tensor:
        """A flat moment of a part. The update may overwrite it and then calls `encode`."""
        if moment in state:
            return state[moment]
        codes, scales = _blocks(state, moment)
        return self._books[moment].decode(codes, scales, state[f"{moment}.table"]).view(-1)

    def encode(self, state: Mapping[str, Tensor], moment: str, values: Tensor) -> None:
        """Store `values`, which are a result of `decode` that the update has overwritten."""
        if moment not in state:
            blocks, table = values.view(-1, BLOCK), state[f"{moment}.table"]
            new = self._books[moment].encode(blocks, table)
            for stored, one in zip(_blocks(state, moment), new, strict=True):
                stored.copy_(one)


def _in_blocks(state: Mapping[str, Any], moment: str) -> int:
    """Number of a parameter's elements that are stored in blocks."""
    return BLOCK * len(state.get(f"{moment}.scales", ()))


def _blocks(state: Mapping[str, Tensor], moment: str) -> tuple[Tensor, Tensor]:
    """Views of the stored codes (blocks, BLOCK) and scales (blocks,)."""
    return state[f"{moment}.codes"].view(-1, BLOCK), state[f"{moment}.scales"]
