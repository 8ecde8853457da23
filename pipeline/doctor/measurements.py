"""The measurements, each a function that runs in several processes, for a limited time (`measure`).

Rates are bytes or operations per second. `budget` is the seconds for one of them.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contracts.optimizer import torch_dtype
from pipeline.distributed.environment import rank_environment
from pipeline.doctor.report import Collective
from pipeline.errors import in_words
from pipeline.hardware.host import cores_each
from pipeline.hardware.telemetry import Telemetry
from pipeline.utils import foreign
from pipeline.utils.files import page_aligned, read_at, write_at
from pipeline.utils.processes import kill_descendants, kill_sessions, received, start_child

if TYPE_CHECKING:
    import torch

Settings = Mapping[str, Any]
Record = Callable[[dict[str, Any]], None]
"""Writes one result of a measurement."""
POLL_SECONDS = 0.02
LONGEST_REASON = 300
LONGEST_PRINTED = 4000
FEWEST, MOST = 1, 50
"""Repetitions of an action, after its warm-up."""
LEEWAY = 0.03
"""Seconds from the last rank's arrival to the departure: torch's file store polls every 10 ms."""
PIECE = 8 << 20
"""Bytes of one read or write."""
BETWEEN_SYNCS = 64 << 20
"""Bytes written before an fsync; few, so that a slow disk is noticed in time."""
SMALLEST, LARGEST = 512, 8192
"""Rows of the matrices that are tried."""
LONG_ENOUGH = {"cpu": 0.02, "cuda": 0.001}
"""Seconds of a product that make the time to launch it negligible."""
BATCHES = 4
ITEM = 4
"""Bytes of an fp32 element."""
CROSSINGS = {"allreduce": 2, "allgather": 1}
"""Times that all data but a process's own share crosses the busiest link."""


@dataclass(frozen=True, kw_only=True)
class RankResults:
    """Records that the ranks wrote, and why some may be missing."""

    records: tuple[tuple[dict[str, Any], ...], ...] = ()
    """Records by rank."""
    failure: str = ""
    """Reason in one line; empty if all ranks ended well."""
    late: bool = False
    """Whether the time limit was reached."""
    printed: str = ""
    """End of the output of the rank that failed."""


def measure(target: str, settings: Mapping[str, Any], *, procs: int, seconds: float) -> RankResults:
    """Call `target`, a `module:function(settings, record)`, in `procs` processes at once.

    `settings["store"]` names a file in which the processes can meet; `record` writes a result.

    Returns after `seconds`, plus the time to start and to kill processes, whatever these do. No
    process outlives the call or this process.
    """
    try:
        scratch = tempfile.TemporaryDirectory(prefix="pipe-doctor-")
    except OSError as error:
        return RankResults(failure=f"it has no folder for its files: {in_words(error)}")
    with scratch as name, kill_descendants():
        folder = Path(name)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            processes += _start(target, settings, procs, folder)
            results = _wait(processes, folder, seconds)
        except OSError as error:
            results = RankResults(failure=f"no process could be started: {error}")
        finally:
            kill_sessions(processes)
        files = (folder / f"rank-{rank}.jsonl" for rank in range(procs))
        return replace(results, records=tuple(tuple(foreign.read_lines(file)) for file in files))


def _start(
    target: str, settings: Mapping[str, Any], procs: int, folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    message = {
        "target": target, "folder": str(folder),
        "settings": {**settings, "store": str(folder / "store")},
    }  # fmt: skip
    threads = {"OMP_NUM_THREADS": str(cores_each(procs))}
    for rank in range(procs):
        with (folder / f"rank-{rank}.log").open("wb") as log:
            yield start_child(
                "pipeline.doctor.measurements",
                message,
                env={**threads, **os.environ, **rank_environment(rank, procs)},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, seconds: float) -> RankResults:
    """Wait until a rank fails, all end, or the time is up."""

    def printed(rank: int) -> str:
        log = (folder / f"rank-{rank}.log").read_text("utf-8", errors="replace")
        return log.strip()[-LONGEST_PRINTED:]

    deadline = time.monotonic() + seconds
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                said = printed(rank)
                reason = (said.splitlines() or [f"exit code {code}"])[-1][:LONGEST_REASON]
                if code < 0:
                    reason = f"its process was killed ({signal.Signals(-code).name})"
                return RankResults(failure=reason, printed=said)
        if all(code == 0 for code in codes):
            return RankResults()
        if time.monotonic() > deadline:
            failure = f"given up after {seconds:.0f} s"
            return RankResults(failure=failure, late=True, printed=printed(0))
        time.sleep(POLL_SECONDS)


def main(target: str, folder: str, settings: Mapping[str, Any]) -> None:
    """Call `target` in this rank; exit with code 1 and one line if it raises."""
    file = Path(folder) / f"rank-{os.environ['RANK']}.jsonl"
    module, _, function = target.partition(":")
    try:
        measurement = getattr(importlib.import_module(module), function)
        measurement(settings, lambda record: foreign.append_line(file, record))
    except Exception as error:
        print(" ".join(in_words(error).split()), file=sys.stderr, flush=True)
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # threads of communication libraries may never end


def measure_torch(settings: Settings, record: Record) -> None:
    """Record what NVIDIA's driver says of the GPUs, then torch's CUDA, NCCL and devices; `problem`
    is why it cannot be imported or use them. In a process, as a broken driver may not answer."""
    gpus = Telemetry()
    record({"driver": gpus.driver, "uuids": gpus.uuids})
    record({"links": gpus.links(), "numa_nodes": gpus.numa_nodes()})
    try:
        import torch
    except Exception as error:  # a broken installation may raise anything
        record({"problem": f"torch cannot be imported: {error}", "devices": []})
        return
    devices, nccl = [], None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
            properties = torch.cuda.get_device_properties(index)
            device = {
                "name": properties.name,
                "uuid": f"GPU-{properties.uuid}",
                "memory_bytes": properties.total_memory,
                "memory_free_bytes": torch.cuda.mem_get_info(index)[0],
                "compute_capability": f"{properties.major}.{properties.minor}",
            }
            devices.append(device)
    problem = None if devices or not caught else str(caught[0].message).split("\n")[0]
    if torch.version.cuda is not None and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    record({"cuda": torch.version.cuda, "nccl": nccl, "problem": problem, "devices": devices})


def measure_disk(settings: Settings, record: Record) -> None:
    """Write up to `size` bytes in `folder` with `fsync`, then read them, as one process.

    The page cache of the file is dropped before it is read (POSIX_FADV_DONTNEED). Caches of the
    disk itself, of a file server or of a virtual machine's host are not.
    """
    data = memoryview(os.urandom(PIECE))  # some file systems and disks compress
    # a file without a name leaves nothing, however this process ends
    with tempfile.TemporaryFile(dir=settings["folder"], buffering=0) as file:
        descriptor = file.fileno()
        written, seconds = _write(descriptor, data, settings["size"], settings["budget"])
        record({"disk_write_bytes_per_s": written / seconds})
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        into = page_aligned(PIECE)
        into[:] = bytes(PIECE)  # touch the pages
        start, done = time.perf_counter(), 0
        while done < written and time.perf_counter() - start < settings["budget"]:
            done += read_at(descriptor, done, into)
        record({"disk_read_bytes_per_s": done / (time.perf_counter() - start)})


def _write(descriptor: int, data: memoryview, size: int, budget: float) -> tuple[int, float]:
    start, done = time.perf_counter(), 0
    while done < size and time.perf_counter() - start < budget:
        until = min(done + BETWEEN_SYNCS, size)
        while done < until:
            write_at(descriptor, done, data)
            done += len(data)
        os.fsync(descriptor)
    return done, time.perf_counter() - start


def measure_copies(settings: Settings, record: Record) -> None:
    """Copy `size` bytes within host memory, and to (h2d) and from (d2h) a GPU, page-locked. All
    ranks copy at the same time; the slowest one's rate is recorded."""
    import torch

    size, timed = settings["size"], _timer(settings, Rendezvous(settings))

    def rate(name: str, into: torch.Tensor, source: torch.Tensor) -> None:
        record({f"{name}_bytes_per_s": size / timed(lambda: into.copy_(source))})

    rate("host_copy", torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8))
    if settings["device"] == "cuda":
        gpu = torch.zeros(size, dtype=torch.uint8, device="cuda")
        pinned = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        rate("h2d", gpu, pinned)
        rate("d2h", pinned, gpu)


def measure_matmul(settings: Settings, record: Record) -> None:
    """Multiply matrices in each of `dtypes`, under torch's default settings (no TF32).

    All ranks compute at the same time; the slowest one's rate is recorded. The fastest of several
    batches counts, as other programs on the machine only slow one down.
    """
    import torch

    device, timed = settings["device"], _timer(settings, Rendezvous(settings))

    def product(size: int, dtype: torch.dtype) -> Callable[[], object]:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        return lambda: left @ right

    for name in settings["dtypes"]:
        dtype = torch_dtype(name)
        size = SMALLEST  # rows of square matrices whose product keeps the device busy
        while size < LARGEST:
            if timed(product(size, dtype), budget=0) > LONG_ENOUGH[device]:
                break
            size *= 2
        action, batch = product(size, dtype), settings["budget"] / BATCHES
        fastest = min(timed(action, budget=batch) for _ in range(BATCHES))
        record({name: 2 * size**3 / fastest})


def measure_collectives(settings: Settings, record: Record) -> None:
    """Record operation, bytes and seconds on rank 0, for each of `sizes` (bytes, ascending, rounded
    to whole shares). `budget` is the seconds for one operation; sizes that would need far more are
    skipped."""
    import torch
    import torch.distributed as dist

    from pipeline.distributed.process_group import environment_dist

    meeting = Rendezvous(settings)
    here = environment_dist(meeting.store, device=settings["device"])
    timed = _timer(settings, meeting)
    for size in settings["sizes"]:
        share = max(size // ITEM // here.world_size, 1)
        whole = torch.zeros(share * here.world_size, device=here.device)
        own = torch.ones(share, device=here.device)
        actions: dict[str, Callable[[], object]] = {
            "allreduce": partial(dist.all_reduce, whole),
            "allgather": partial(dist.all_gather_into_tensor, whole, own),
        }
        worst = 0.0
        for name, action in actions.items():
            seconds = timed(action)
            worst = max(worst, seconds)
            if here.is_main:
                record({"operation": name, "bytes": whole.numel() * ITEM, "seconds": seconds})
        if worst > 4 * settings["budget"]:
            break
    dist.destroy_process_group()


def bandwidth(operation: str, bytes: int, seconds: float, procs: int) -> Collective:
    """The result of an operation on `bytes` bytes, with nccl-tests' definitions: the bus bandwidth
    is 2 (n - 1) / n times the algorithm bandwidth in an all-reduce, (n - 1) / n in an all-gather.
    """
    rate = bytes / seconds
    busbw = rate * CROSSINGS[operation] * (procs - 1) / procs
    return Collective(bytes=bytes, seconds=seconds, algbw=rate, busbw=busbw)


def _timer(settings: Settings, meeting: Rendezvous) -> Callable[..., float]:
    """Return `seconds_each` for this measurement, on this rank's GPU if there is one."""
    device = settings["device"]
    if device == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return partial(seconds_each, device=device, budget=settings["budget"], agree=meeting.slowest)


def seconds_each(
    action: Callable[[], object],
    *,
    device: str,
    budget: float,
    agree: Callable[[float], float],
) -> float:
    """Mean seconds of one `action`, repeated for about `budget` seconds.

    `agree` returns one time for all ranks, which so repeat the action equally often, and makes them
    wait for each other.
    """

    def timed(count: int) -> float:
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            action()
        _synchronize(device)
        return max(time.perf_counter() - start, 1e-9)

    timed(1)  # warm up caches, connections, clocks
    once = agree(timed(1))
    count = min(max(int(budget / once), FEWEST), MOST)
    return agree(timed(count)) / count


def _synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


class Rendezvous:
    """Meeting point of a measurement's processes: a file, as a network may be what is broken."""

    def __init__(self, settings: Settings) -> None:
        import torch.distributed as dist

        self._rank, self._procs = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store = dist.FileStore(settings["store"], self._procs)  # type: ignore[attr-defined]
        self._calls = 0

    def slowest(self, seconds: float) -> float:
        """The longest time of all ranks; they return from this at the same moment (collective)."""
        if self._procs == 1:
            return seconds
        self._calls += 1
        own = {"seconds": seconds, "go": time.monotonic() + LEEWAY}
        self.store.set(f"{self._calls}/{self._rank}", json.dumps(own))
        ranks = [json.loads(self.store.get(f"{self._calls}/{r}")) for r in range(self._procs)]
        # the processes of a machine share one clock
        time.sleep(max(0.0, max(rank["go"] for rank in ranks) - time.monotonic()))
        return float(max(rank["seconds"] for rank in ranks))


if __name__ == "__main__":
    main(**received(sys.argv[1], ends_with_parent=True))
