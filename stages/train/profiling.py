"""Steps under torch.profiler."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline.engine import Engine
from stages.train.trace import STEP, communication_share

FOLDER = "profile"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What the profile of a step says."""

    seconds: float
    """Of the step, the profiler's own work in it included."""
    communication: float | None
    """Mean of the ranks' `communication_share`; None if it cannot be told."""


class Profiler:
    """Records some of the steps, and leaves each rank's traces in the run's folder."""

    def __init__(self, steps: Sequence[int], run_dir: Path, engine: Engine) -> None:
        self._steps = frozenset(steps)
        self._folder = run_dir / FOLDER
        self._engine = engine

    def wants(self, step: int) -> bool:
        """Whether the step of this number is to be recorded."""
        return step in self._steps

    def record(self, step: int, take: Callable[[], T]) -> tuple[T, Profile]:
        """Call `take`, which is that step, and write its trace (collective). Returns what it
        returns."""
        device, shard = self._engine.device, self._engine.shard
        on_gpu = device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=kinds) as recorded:
            _wait_for_all(shard.count)  # starting takes some ranks longer than others
            began = time.perf_counter()
            with record_function(STEP):
                taken = take()
                if on_gpu:
                    torch.cuda.synchronize(device)
            seconds = time.perf_counter() - began
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"step-{step:08d}-rank-{shard.index:05d}.json.gz"
        recorded.export_chrome_trace(str(path))
        with gzip.open(path, "rt", encoding="utf-8") as file:
            share = communication_share(json.load(file)["traceEvents"], ranks=shard.count)
        return taken, Profile(seconds=seconds, communication=_mean(share, shard.count, device))


def _wait_for_all(ranks: int) -> None:
    if ranks > 1:
        torch.distributed.barrier()


def _mean(share: float | None, ranks: int, device: torch.device) -> float | None:
    """Over all ranks; None if one cannot tell."""
    told = torch.tensor([share or 0.0, float(share is not None)], device=device)
    if ranks > 1:
        torch.distributed.all_reduce(told)
    total, known = told.tolist()
    return total / ranks if round(known) == ranks else None
