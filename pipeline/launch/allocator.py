"""Settings of torch's memory allocator on GPUs."""

from __future__ import annotations

import os

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of the allocator: the name that all devices share, and the older one."""


def environment() -> dict[str, str]:
    """Variables with which ranks reserve memory in segments that grow, unless the user has set the
    allocator: gathered units and activations differ in size, and would leave gaps between segments
    of fixed sizes. No rank shares its GPU's memory with another process, where such segments can
    fail."""
    if any(name in os.environ for name in SETTINGS):
        return {}
    return {SETTINGS[0]: "expandable_segments:True"}
