"""Memory to read files into."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from pipeline.files import page_aligned


def test_memory_begins_with_a_page() -> None:
    memory = page_aligned(100_001)
    assert len(memory) == 100_001
    assert torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % mmap.PAGESIZE == 0
    assert len(page_aligned(0)) == 0


def test_memory_is_not_shared_with_forked_processes() -> None:
    """Two readers of one buffer would each find the other's bytes in it."""
    memory = page_aligned(100_001)
    assert permissions(torch.frombuffer(memory, dtype=torch.uint8).data_ptr()) == "rw-p"


def permissions(address: int) -> str:
    """Of the mapping that holds the address: proc_pid_maps(5)."""
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        span, found = line.split()[:2]
        first, last = (int(edge, 16) for edge in span.split("-"))
        if first <= address < last:
            return found
    raise AssertionError("nothing is mapped there")
