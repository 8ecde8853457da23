"""Matrix products: the operations per second that training can come near to."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.doctor.probes import Rendezvous, seconds_each

if TYPE_CHECKING:
    import torch

SMALLEST, LARGEST = 512, 8192
LONG_ENOUGH = {"cpu": 0.02, "cuda": 0.001}
"""Seconds of one product that hide what starting it takes."""
BATCHES = 4


def measure(settings: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Tell operations per second for each of `dtypes`, under torch's default settings (no TF32).

    All ranks compute at the same time, and tell what the slowest of them reaches. Of several
    batches within `budget` seconds the fastest counts: what else runs on the machine only slows
    them down.
    """
    import torch

    device = settings["device"]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    timed = partial(seconds_each, device=device, agree=Rendezvous(settings).slowest)
    for name in settings["dtypes"]:
        size = _large_enough(device, dtypes[name], timed)
        product = _product(size, device, dtypes[name])
        batch = settings["budget"] / BATCHES
        fastest = min(timed(product, budget=batch) for _ in range(BATCHES))
        tell({name: 2 * size**3 / fastest})


def _large_enough(device: str, dtype: torch.dtype, timed: Callable[..., float]) -> int:
    """Rows of square matrices that keep the device busy for a while."""
    size = SMALLEST
    while size < LARGEST:
        if timed(_product(size, device, dtype), budget=0) > LONG_ENOUGH[device]:
            break
        size *= 2
    return size


def _product(size: int, device: str, dtype: torch.dtype) -> Callable[[], object]:
    import torch

    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return lambda: left @ right
