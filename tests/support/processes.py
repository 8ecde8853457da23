"""Run a function on several ranks of a real gloo process group, each in its own process."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.tier import times

HARD_LIMIT_SECONDS = 240
GROUP_LIMIT = times(quick=480, full=1800)
"""Seconds of many programs in one group of ranks."""


class RankFailed(AssertionError):
    """A rank raised, was killed, or did not end in time."""


def forking() -> Any:
    """Return multiprocessing's context of processes that have torch and the engines imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    return context


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, limit: int = HARD_LIMIT_SECONDS
) -> list[Any]:
    """Call `function(dist, *args)` on `world_size` ranks; return its JSON results in rank order.

    `function` must be importable (module level). Raises RankFailed with the traceback of the ranks
    that failed; no process outlives the call.
    """
    context = forking()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(function, rank, world_size, folder, args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, limit)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return [_result(Path(folder), rank, ranks[rank].exitcode) for rank in range(world_size)]


Call = tuple[Any, ...]
"""A function of a rank and its further arguments."""


def in_turn(dist: Any, calls: Sequence[Call]) -> list[Any]:
    """Run one function after another in one process group; return their results."""
    return [function(dist, *args) for function, *args in calls]


def _wait(ranks: list[Any], limit: int) -> None:
    deadline = time.monotonic() + limit
    while any(process.is_alive() for process in ranks):
        if any(process.exitcode for process in ranks):  # the others may yet report their errors
            deadline = min(deadline, time.monotonic() + 1)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _result(folder: Path, rank: int, exitcode: int | None) -> Any:
    failures = [
        f"rank {path.stem.rpartition('-')[2]}:\n{path.read_text()}"
        for path in sorted(folder.glob("error-*.txt"))
    ]
    path = folder / f"result-{rank}.json"
    if failures or exitcode or not path.exists():
        raise RankFailed("\n".join(failures) or f"rank {rank} ended with exit code {exitcode}")
    return json.loads(path.read_text())


def _allow_fp16() -> None:
    """DeepSpeed, where it is installed, refuses fp16 on CPUs without fp16 arithmetic; torch
    computes it on all of them."""
    with contextlib.suppress(ImportError):
        from deepspeed.accelerator import get_accelerator

        type(get_accelerator()).is_fp16_supported = lambda self: True


def _rank(
    function: Callable[..., Any], rank: int, world_size: int, folder: str, args: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch
    import torch.distributed

    from pipeline.distributed.process_group import DistContext
    from tests.support.forked import fork_children

    fork_children()
    torch.set_num_threads(1)
    _allow_fp16()
    try:
        store = torch.distributed.FileStore(f"{folder}/store", world_size)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        dist = DistContext(
            rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size,
            device=torch.device("cpu"),
            store=torch.distributed.distributed_c10d._get_default_store(),
        )  # fmt: skip
        result = function(dist, *args)
        Path(folder, f"result-{rank}.json").write_text(json.dumps(result))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        Path(folder, f"error-{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)
