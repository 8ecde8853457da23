"""Weights in 4 bits, as QLoRA has them: codes, and a scale for each block of them.

Dettmers et al. 2023, QLoRA, section 3: elements of a block are divided by the largest of them, and
the nearest of 16 values stands for each. Scales stay fp32; they are not quantised themselves.

A packed weight is one flat tensor of bytes: the codes of all elements, two in a byte, then the
scales of all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from stages.adapter.compat import bitsandbytes
from stages.adapter.four_bit_sizes import BLOCK, code_bytes, packed_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from stages.adapter.artifact import FourBits


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
