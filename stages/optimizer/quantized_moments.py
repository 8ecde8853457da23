"""How AdamW's moments are kept: in a dtype, or in blocks of codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.contracts.optimizer import StateCodec
from stages.optimizer.codes import AT_A_TIME, Book4, Book8, Code, Fp8

MOMENTS = ("exp_avg", "exp_avg_sq")
SMALLEST = 4096
"""Elements; smaller parameters have no blocks, as in bitsandbytes and torchao."""


class Part(NamedTuple):
    """Elements [start, stop) of a parameter, whose moments are kept alike, with their state."""

    start: int
    stop: int
    state: Mapping[str, Tensor]


class MomentPacking(StateCodec):
    """A packing that the update can use: moments are decoded, updated, encoded."""

    def parts(self, state: Mapping[str, Tensor], count: int) -> Iterator[Part]:
        """All of a parameter's `count` elements."""
        yield Part(0, count, {name: state[name] for name in MOMENTS})

    def tables(self, device: torch.device) -> Mapping[str, Tensor]:
        """By moment, what decoding and encoding need on a device."""
        return {}

    def decode(
        self, state: Mapping[str, Tensor], moment: str, tables: Mapping[str, Tensor]
    ) -> Tensor:
        """A moment of a part, flat, for the update to overwrite; it counts after `encode`."""
        return state[moment]

    def encode(
        self, state: Mapping[str, Tensor], moment: str, values: Tensor, tables: Mapping[str, Tensor]
    ) -> None:
        """Keep what `decode` gave and the update has overwritten."""


class Plain(MomentPacking):
    """Flat tensors of one dtype, which are decoded as they are; None is the parameter's."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype

    def start(self, parameter: Tensor, count: int) -> dict[str, Tensor]:
        dtype = self._dtype or parameter.dtype
        return {name: torch.zeros(count, dtype=dtype, device=parameter.device) for name in MOMENTS}

    def unpack(self, state: Mapping[str, Any], moment: str, start: int, stop: int) -> Tensor:
        values: Tensor = state[moment]
        return values[start:stop]

    def pack(self, state: Mapping[str, Any], moment: str, values: Tensor) -> None:
        """What was unpacked is the moment itself."""


class Blockwise(MomentPacking):
    """Codes and a scale for each block. What is less than a block at the end, and small parameters,
    are kept in fp32."""

    def __init__(self, codes: Mapping[str, Code]) -> None:
        self._codes = codes
        self._tables: dict[torch.device, dict[str, Tensor]] = {}
        (self._block,) = {code.block for code in codes.values()}

    def _whole(self, count: int) -> int:
        """How many of a parameter's elements are in blocks."""
        return 0 if count < SMALLEST else count - count % self._block

    def start(self, parameter: Tensor, count: int) -> dict[str, Tensor]:
        state, device, whole = {}, parameter.device, self._whole(count)
        for moment, code in self._codes.items():
            if whole:
                size = whole // code.packed
                state[f"{moment}.codes"] = torch.zeros(size, dtype=code.stored, device=device)
                state[f"{moment}.scales"] = torch.zeros(whole // self._block, device=device)
            if whole < count:
                state[moment] = torch.zeros(count - whole, device=device)
        return state

    def parts(self, state: Mapping[str, Tensor], count: int) -> Iterator[Part]:
        whole = self._whole(count)
        if whole:
            kept = ("codes", "scales")
            yield Part(0, whole, {k: state[k] for m in MOMENTS for k in (f"{m}.{x}" for x in kept)})
        if whole < count:
            yield Part(whole, count, {name: state[name] for name in MOMENTS})

    def unpack(self, state: Mapping[str, Any], moment: str, start: int, stop: int) -> Tensor:
        values, rest = [], state.get(moment)
        whole = self._stored(state, moment)
        if start < whole:
            values.append(self._unpack_blocks(state, moment, start, min(stop, whole)))
        if rest is not None and stop > whole:
            values.append(rest[max(start - whole, 0) : stop - whole])
        return torch.cat(values)

    def _stored(self, state: Mapping[str, Any], moment: str) -> int:
        """How many of its elements are in blocks."""
        scales = state.get(f"{moment}.scales")
        return 0 if scales is None else self._block * len(scales)

    def _unpack_blocks(
        self, state: Mapping[str, Any], moment: str, start: int, stop: int
    ) -> Tensor:
        first, last = start // self._block, -(-stop // self._block)
        code = self._codes[moment]
        codes, scales = _blocks(state, moment)
        table = self.tables(scales.device)[moment]
        values = code.decode(codes[first:last], scales[first:last], table).view(-1)
        # + 0.0: where a scale is 0, a negative code means -0.0
        return values[start - first * self._block : stop - first * self._block] + 0.0

    def pack(self, state: Mapping[str, Any], moment: str, values: Tensor) -> None:
        whole = self._stored(state, moment)
        if whole < len(values):
            state[moment].copy_(values[whole:])
        if whole:
            codes, scales = _blocks(state, moment)
            table = self.tables(scales.device)[moment]
            blocks = values[:whole].view(-1, self._block)
            many = AT_A_TIME // self._block
            for first in range(0, len(scales), many):
                part = slice(first, first + many)
                exact = self._codes[moment].encode_again(blocks[part], table)
                codes[part].copy_(exact[0])
                scales[part].copy_(exact[1])

    def tables(self, device: torch.device) -> Mapping[str, Tensor]:
        if device not in self._tables:
            self._tables[device] = {m: code.table(device) for m, code in self._codes.items()}
        return self._tables[device]

    def decode(
        self, state: Mapping[str, Tensor], moment: str, tables: Mapping[str, Tensor]
    ) -> Tensor:
        if moment in state:
            return state[moment]
        return self._codes[moment].decode(*_blocks(state, moment), tables[moment]).view(-1)

    def encode(
        self, state: Mapping[str, Tensor], moment: str, values: Tensor, tables: Mapping[str, Tensor]
    ) -> None:
        if moment not in state:
            codes, scales = _blocks(state, moment)
            new = self._codes[moment].encode(values.view(-1, self._block), tables[moment])
            codes.copy_(new[0])
            scales.copy_(new[1])


def _blocks(state: Mapping[str, Tensor], moment: str) -> tuple[Tensor, Tensor]:
    """Live codes, shape (blocks, stored elements of a block), and scales (blocks,)."""
    scales = state[f"{moment}.scales"]
    return state[f"{moment}.codes"].view(len(scales), -1), scales


def packing(kept: str) -> MomentPacking:
    """For the field `moments` of optimizer.adamw. Raises StageError without torchao."""
    if kept in ("8bit", "4bit"):
        book = Book8 if kept == "8bit" else Book4
        return Blockwise({"exp_avg": book(signed=True), "exp_avg_sq": book(signed=False)})
    if kept == "fp8":
        return Blockwise(dict.fromkeys(MOMENTS, Fp8()))
    return Plain({"fp32": torch.float32, "bf16": torch.bfloat16, "master": None}[kept])
