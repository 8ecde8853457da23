"""Readings of a GPU beside what torch says of it, and beside known work."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.distributed.process_group import DistContext
from pipeline.execution.gpu_records import read_record, record_memory
from pipeline.hardware.telemetry import GpuReading, Telemetry
from tests.support.runs import context

GIB = 1 << 30


@pytest.fixture
def read(gpu: DistContext) -> Callable[[], GpuReading]:
    telemetry = Telemetry()
    assert telemetry.kind == torch.cuda.get_device_name(gpu.device)
    return lambda: telemetry.read()[0]


def test_a_reading(read: Callable[[], GpuReading]) -> None:
    found = read()
    total = torch.cuda.get_device_properties(0).total_memory
    assert found.memory_total_bytes == pytest.approx(total, rel=0.05)
    assert found.memory_bytes is not None
    assert 0 < found.memory_bytes < total * 1.05
    assert found.watts is not None
    assert 5 < found.watts < 2000
    assert found.temperature is not None
    assert 5 < found.temperature < 110


def test_memory_of_an_allocation(read: Callable[[], GpuReading]) -> None:
    torch.cuda.empty_cache()
    before = read().memory_bytes
    held = torch.zeros(4 * GIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    during = read().memory_bytes
    del held
    torch.cuda.empty_cache()
    after = read().memory_bytes
    assert before is not None
    assert during is not None
    assert after is not None
    # Other processes of these tests may take a GiB of their own meanwhile.
    assert during - before == pytest.approx(4 * GIB, abs=1.5 * GIB)
    assert during - after == pytest.approx(4 * GIB, abs=1.5 * GIB)


def test_use_while_it_computes(read: Callable[[], GpuReading]) -> None:
    matrix = torch.rand(4096, 4096, device="cuda")
    used, deadline = 0.0, time.monotonic() + 5
    while used <= 0.5 and time.monotonic() < deadline:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize()
        used = read().utilisation or 0.0
    assert used > 0.5


def test_the_record_of_a_training(gpu: DistContext, tmp_path: Path) -> None:
    held = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    ctx = context(gpu, tmp_path)
    record_memory(ctx)
    found = read_record(tmp_path)
    assert found.device == torch.cuda.get_device_name(gpu.device)
    assert held.numel() <= found.allocated_bytes <= found.reserved_bytes < found.device_bytes
    assert 0.1 * GIB < found.beside_bytes < found.device_bytes - found.reserved_bytes
