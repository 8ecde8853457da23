"""Each process of a measurement: both loops, in turns, with all ranks in step."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import os
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed
from bare.loop import BareLoop
from overhead_job import Job
from overhead_ours import OurLoop, run_context, run_folder, source

from pipeline.distributed.process_group import DistContext, environment_dist

RESULT = "result.json"
SPOKEN = "output-"
"""Beginning of the name of a rank's output file, before the rank's number."""
CALIBRATION_REPEATS = 3
SIDE = {"cpu": 512, "cuda": 4096}
"""Rows of the square fp32 matrices that are multiplied, which takes a few milliseconds."""


class Loop(Protocol):
    """One of the two loops."""

    def run(self, steps: int) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Block:
    """Steps of one loop between two calibrations. Times are seconds of the slowest rank, but `cpu`
    is rank 0's processor time."""

    seconds: float
    cpu: float
    before: float
    after: float
    loss: float


def main(job: Job, rank: int) -> None:
    """Join the group, measure, write the result into the job's folder."""
    speak_into(job.folder / f"{SPOKEN}{rank}")
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(job.procs), LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(job.procs),
    )  # fmt: skip
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run_folder(job).mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        log = file_log(job, rank)
        meeting = str(job.folder / "store")
        store = torch.distributed.FileStore(meeting, job.procs)  # type: ignore[attr-defined]
        dist = environment_dist(store, device=job.device)
        ctx = run_context(job, dist, log, stack.callback)
        model = source(job, ctx)
        ours, bare = OurLoop(job, ctx, model), BareLoop(job, dist, model)
        rounds = measure(job, dist, ours, bare)
        if dist.is_main:
            result = {"rounds": rounds, "engine": dict(ours.engine.describe())}
            (job.folder / RESULT).write_text(json.dumps(result), "utf-8")
        dist.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # library threads may abort a finished process


def speak_into(path: Path) -> None:
    """Redirect this process's output, and that of native code, to a file."""
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def file_log(job: Job, rank: int) -> logging.Logger:
    """Return a log with a file for each rank, as in a run."""
    log = logging.getLogger("pipe")
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(logging.FileHandler(run_folder(job) / f"rank-{rank}.log"))
    return log


def measure(job: Job, dist: DistContext, ours: Loop, bare: Loop) -> list[dict[str, Any]]:
    """Measure `job.rounds` pairs of blocks, {"ours": ..., "bare": ...}; the loops alternate in
    going first."""
    sides = {"ours": ours, "bare": bare}
    for loop in sides.values():
        loop.run(job.steps)
    gc.collect()
    calibrate = calibration(dist)
    before = calibrate()
    rounds = []
    for number in range(job.rounds):
        pair = {}
        for name in sorted(sides, reverse=bool(number % 2)):
            seconds, cpu, loss = timed(sides[name], job.steps, dist)
            after = calibrate()
            pair[name] = asdict(
                Block(seconds=seconds, cpu=cpu, before=before, after=after, loss=loss)
            )
            before = after
        rounds.append(pair)
    return rounds


def timed(loop: Loop, steps: int, dist: DistContext) -> tuple[float, float, float]:
    """Return seconds of the slowest rank, processor seconds of this one, and the loss."""
    meet(dist)
    began, cpu = time.perf_counter(), time.process_time()
    loss = loop.run(steps)
    meet(dist)
    return time.perf_counter() - began, time.process_time() - cpu, loss


def meet(dist: DistContext) -> None:
    """Wait until all ranks and their devices have arrived here."""
    if dist.device.type == "cuda":
        torch.cuda.synchronize()
    torch.distributed.all_reduce(torch.zeros(1))


def calibration(dist: DistContext) -> functools.partial[float]:
    """Return a call that gives the machine's current speed: the seconds of a fixed matrix
    product."""
    side = SIDE[dist.device.type]
    matrix = torch.rand(side, side, device=dist.device)
    return functools.partial(_calibrate, matrix, dist)


def _calibrate(matrix: torch.Tensor, dist: DistContext) -> float:
    """Return the best of a few times on each rank, the worst over ranks, all computing at once."""
    best = float("inf")
    for _ in range(CALIBRATION_REPEATS):
        meet(dist)
        began = time.perf_counter()
        matrix @ matrix
        if dist.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    worst = torch.tensor([best])
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
    return worst.item()
