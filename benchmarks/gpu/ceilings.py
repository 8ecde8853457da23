"""The most that the device does: products of matrices, copies, attention."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SIDE = 8192
REPEATS = 10
HEADS, SHARED = 32, 8
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def measure(file: Path, length: int) -> None:
    """Write rates of the device as JSON."""
    file.write_text(json.dumps(rates(length)), "utf-8")


def rates(length: int) -> dict[str, Any]:
    """Return rates of the device in TFLOP/s and GB/s; attention's in TFLOP/s forward and backward,
    a causal mask's half counted."""
    device = torch.device("cuda")
    found: dict[str, Any] = {
        "name": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "memory": torch.cuda.get_device_properties(device).total_memory,
    }
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    work = 2.0 * SIDE**3 / 1e12
    found["bf16_tflops"] = work / _seconds(lambda: a @ b)
    found["fp8_tflops"] = _or_error(lambda: work / _seconds(_narrow(a, b)))
    big = torch.empty(1 << 30, device=device, dtype=torch.uint8)
    other = torch.empty_like(big)
    found["copy_gb_s"] = 2 * big.numel() / 1e9 / _seconds(lambda: other.copy_(big))
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    found["to_host_gb_s"] = big.numel() / 1e9 / _seconds(lambda: host.copy_(big, non_blocking=True))
    found["to_device_gb_s"] = (
        big.numel() / 1e9 / _seconds(lambda: big.copy_(host, non_blocking=True))
    )
    for size in (64, 128):
        for name, backend in BACKENDS.items():
            key = f"attention_{size}_{name}_tflops"
            found[key] = _or_error(lambda s=size, k=backend: _attention(s, k, length))  # type: ignore[misc]
    return found


def _narrow(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    one = torch.ones((), device=a.device)
    left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    return lambda: torch._scaled_mm(
        left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _attention(size: int, backend: SDPBackend, length: int) -> float:
    shape = (2, HEADS, length, size)
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (
        torch.randn(
            2, SHARED, length, size, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        for _ in range(2)
    )
    grad = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def both() -> None:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.backward(grad)

    work = 2 * HEADS * length**2 * size * (4 + 10) / 2 / 1e12
    return work / _seconds(both)


def _seconds(call: Callable[[], object]) -> float:
    """Return the median time of a call on the device."""
    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _or_error(call: Callable[[], float]) -> float | str:
    try:
        return call()
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return str(error).splitlines()[0][:200]
