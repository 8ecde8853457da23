"""Copies within host memory, and between host and GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.doctor.probes import Rendezvous, seconds_each


def measure(settings: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Tell bytes copied per second, of `size` bytes at a time (`budget` seconds each): as the host
    copies them, and with a GPU to it (h2d) and from it (d2h), page-locked or pageable. All ranks
    copy at the same time, and tell what the slowest of them reaches."""
    import torch

    device, size = settings["device"], settings["size"]
    together = Rendezvous(settings)

    def rate(name: str, into: torch.Tensor, source: torch.Tensor) -> None:
        seconds = seconds_each(
            lambda: into.copy_(source),
            device=device,
            budget=settings["budget"],
            agree=together.slowest,
        )
        tell({f"{name}_bytes_per_s": size / seconds})

    host = torch.ones(size, dtype=torch.uint8)
    rate("host_copy", torch.zeros(size, dtype=torch.uint8), host)
    if device != "cuda":
        return
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    there = torch.zeros(size, dtype=torch.uint8, device="cuda")
    rate("h2d_pageable", there, host)
    rate("d2h_pageable", host, there)
    pinned = torch.ones(size, dtype=torch.uint8, pin_memory=True)
    rate("h2d", there, pinned)
    rate("d2h", pinned, there)
