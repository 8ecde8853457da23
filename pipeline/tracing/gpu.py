"""Memory of tensors on a GPU, as torch's allocator counts it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from pipeline.forecast.phases import LOAD
from pipeline.stage import Context
from pipeline.tracing.watch import Watch


class GpuPeaks(Watch):
    """The most that there was in each phase."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._phase = LOAD
        torch.cuda.reset_peak_memory_stats()

    def phase(self, name: str) -> None:
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated()
        self.peaks[self._phase] = max(most, self.peaks.get(self._phase, 0))
        self._phase = name
        torch.cuda.reset_peak_memory_stats()

    def loaded(self, model: nn.Module) -> None:
        """Nothing is told apart."""

    @contextlib.contextmanager
    def watching(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, phases are told."""
        yield
        self.phase("")


class GpuSession:
    """A rank on its GPU."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.watch = GpuPeaks()

    @contextlib.contextmanager
    def metering(self) -> Iterator[None]:
        """The allocator counts by itself."""
        yield
