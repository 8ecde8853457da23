"""torch's dtypes and the safetensors format's names of them."""

from __future__ import annotations

import torch

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}


def code(dtype: torch.dtype) -> str:
    """The format's name of a dtype."""
    return CODES[dtype]


def dtype(code: str) -> torch.dtype:
    """The dtype that the format calls `code`."""
    return DTYPES[code]


def as_bytes(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous flat tensor on the CPU."""
    return memoryview(flat.detach().view(torch.uint8).numpy().data)
