"""The measured process: `python -m apart.child ORDER`, started by `crew.measure`.

ORDER is JSON. The process writes three lines to standard output: when its imports are done, when
the call has ended, and with the result of the call's own check. It waits for a line on standard
input before the call and before the check. Output of libraries goes to its log.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from apart.footprint import bytes_read, footprint, forget_peak, peak

Job = dict[str, Any]
Check = Callable[[], dict[str, Any]]
Work = Callable[[], Check | dict[str, Any] | None]
"""The measured call. It returns its results, or a check to call for them, which is not measured."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process among the processes that make the call together."""

    rank: int
    world: int
    folder: Path
    """Scratch folder of all processes, empty at first."""
    store: Any = None
    """Store for their process group; None for a single process."""

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world > 1:
            import torch.distributed

            torch.distributed.barrier()

    def dist(self) -> Any:
        """Return the same as the project's DistContext."""
        import torch

        from pipeline.distributed.process_group import DistContext

        return DistContext(
            rank=self.rank, world_size=self.world, local_rank=self.rank,
            local_world_size=self.world, device=torch.device("cpu"), store=self.store,
        )  # fmt: skip


def main(text: str) -> None:
    """Prepare, wait, make the measured call, check."""
    order = json.loads(text)
    place = _meet(order)
    with os.fdopen(os.dup(1), "w") as voice:
        for descriptor in (1, 2):
            os.dup2(os.open(_log(order), os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        work = task(order["task"])(order["job"], place)
        place.barrier()
        _tell(voice, {"idle": footprint()})
        sys.stdin.readline()
        found = _measured(work, place, voice)
        sys.stdin.readline()
        _tell(voice, found() if callable(found) else found or {})
    os._exit(0)  # library threads may abort a finished process


def _measured(work: Work, place: Place, voice: IO[str]) -> Any:
    read, cpu = bytes_read(), time.process_time()
    forget_peak()
    place.barrier()
    began = time.perf_counter()
    found = work()
    place.barrier()
    seconds = time.perf_counter() - began
    measured = {
        "seconds": seconds,
        "cpu": time.process_time() - cpu,
        "read": bytes_read() - read,
        "peak_rss": peak(),
    }
    _tell(voice, measured)
    return found


def _meet(order: dict[str, Any]) -> Place:
    rank, world, folder = order["rank"], order["world"], Path(order["folder"])
    if world == 1:
        return Place(rank=0, world=1, folder=folder)
    import torch.distributed as dist

    from pipeline.distributed.environment import ON_LOOPBACK

    store = dist.FileStore(str(folder / "store"), world)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world)
    )
    os.environ |= ON_LOOPBACK
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=world
    )
    return Place(rank=rank, world=world, folder=folder, store=dist.PrefixStore("pipe", store))


def _log(order: dict[str, Any]) -> Path:
    return Path(order["folder"]) / f"log-{order['rank']}.txt"


def task(name: str) -> Callable[[Job, Place], Work]:
    """Return the function that `MODULE:FUNCTION` names."""
    module, _, function = name.partition(":")
    found: Callable[[Job, Place], Work] = getattr(importlib.import_module(module), function)
    return found


def _tell(voice: IO[str], what: dict[str, Any]) -> None:
    print(json.dumps(what), file=voice, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
