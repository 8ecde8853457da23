"""Two writers of a checkpoint, one of them with a fault at any operation of its save, and what the
store holds afterwards.

`python -m tests.support.sweep`, a process without torch or threads that can fork in no time, reads
a pickled Sweep from standard input and writes a list, a Seen for each fault.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.checkpoint.location import Retention, Store
from pipeline.checkpoint.object_store import ObjectStore
from pipeline.checkpoint.store import LocalStore
from pipeline.checkpoint.writer import carry_out
from tests.support import injection
from tests.support.injection import Fault
from tests.support.tier import spread
from tests.support.tiny_store import Tiny, digests, job, read_digests

OLD, NEW, NEXT = "step-00000001", "step-00000002", "step-00000003"
REPOSITORY = Path(__file__).parent.parent.parent
PATIENT, ABANDONED = 20.0, 0.01
"""Rank 0 ends by itself, or waits for a report that never comes."""


class Injected(NamedTuple):
    rank: int
    fault: Fault
    grace: float


@dataclasses.dataclass(kw_only=True)
class Sweep:
    """A save and its faults. `root` is made anew for each fault. `grace`: seconds after the end of
    rank 1 when rank 0, if it still waits, is killed as by a launcher."""

    tiny: Tiny
    root: str
    faults: list[Injected]
    install: Callable[[Fault], None] = injection.install


@dataclasses.dataclass
class Saved:
    """Result of a save, for each rank."""

    fates: list[int]
    """Exit codes; negative if the rank was killed."""
    problems: list[str]
    """Problem in each rank's outcome; empty also if there is no outcome."""
    warnings: list[list[str]]


@dataclasses.dataclass
class Found:
    """Content of the store."""

    names: list[str]
    exact: bool
    """Whether all listed checkpoints are exact."""
    left: list[str]
    """Names of everything else."""


@dataclasses.dataclass(kw_only=True)
class Seen:
    """The save with the fault and its remains; the next save, after a cleaning, and the content
    then."""

    saved: Saved
    after: Found
    next_saved: Saved
    end: Found


@dataclasses.dataclass
class Recorded:
    """A place for checkpoints, and each rank's operations of an undisturbed save there."""

    tiny: Tiny
    root: Path
    operations: list[list[str]]
    install: Callable[[Fault], None] = injection.install

    def fault(self, **how: Any) -> Fault:
        return Fault(root=self.tiny.setups[0].store, **how)

    def sweep(
        self, faults: list[Injected], install: Callable[[Fault], None] | None = None
    ) -> list[Seen]:
        own = install or self.install
        return sweep(Sweep(tiny=self.tiny, root=str(self.root), faults=faults, install=own))

    def place(self, rank: int, operation: str) -> int:
        """Return the number of an operation."""
        return self.operations[rank].index(operation)

    @property
    def attempt(self) -> Path:
        """Return the folder in which the new checkpoint is written."""
        return self.root / f"{NEW}.tmp-attempt2"

    @property
    def points(self) -> list[int]:
        """Return rank 0's operation that makes the checkpoint appear, and rank 1's after which rank
        0 continues without it."""
        report = f"rename {self.attempt / 'rank-00001.report.partial'}"
        return [self.place(0, f"rename {self.attempt}"), self.place(1, report)]

    def require_killed_anywhere(self, rank: int, point: int, keep: int) -> int:
        """Kill a rank before, in and after its operations, or `keep` of them in the quick tier, and
        require that the new checkpoint is there after `point`, that each is whole, and that the
        next save succeeds. Return how many ways there are to kill it."""
        faults = []
        for number, operation in enumerate(self.operations[rank]):
            for how in ("before", "half", "after"):
                if how != "half" or operation.startswith("pwrite"):
                    new = number > point or (number == point and how == "after")
                    grace = PATIENT if rank == 0 or new else ABANDONED
                    faults.append((Injected(rank, self.fault(at=number, how=how), grace), new))
        chosen = spread(faults, keep)
        found = self.sweep([fault for fault, _ in chosen])
        for ((_, fault, _), new), seen in zip(chosen, found, strict=True):
            assert seen.saved.fates[rank] == -9, fault
            assert seen.after.exact, fault
            assert seen.after.names[-1:] == [NEW if new else OLD], fault
            assert seen.next_saved.problems == ["", ""], fault
            assert seen.end == Found([NEXT], True, []), fault
        return len(faults)


def record(folder: Path, arrangement: str = "sharded", scheme: str = "", **more: Any) -> Recorded:
    """Save twice, keeping one checkpoint."""
    root = folder / "store"
    tiny = Tiny(f"{scheme}{root}", arrangement, Retention(last=1))
    recorded = Recorded(tiny, root, [], **more)
    logs = [folder / f"log-{rank}" for rank in range(2)]
    calm = [Injected(rank, recorded.fault(log=str(logs[rank])), PATIENT) for rank in range(2)]
    for seen in recorded.sweep(calm):
        assert (seen.saved.problems, seen.after.names) == (["", ""], [NEW])
    recorded.operations = [log.read_text().splitlines() for log in logs]
    return recorded


def sweep(work: Sweep, limit: float = 300) -> list[Seen]:
    """Run the sweep in its own process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.sweep"], input=pickle.dumps(work), timeout=limit,
        stdout=subprocess.PIPE, check=True, cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    return pickle.loads(done.stdout)  # noqa: S301


def main() -> None:
    work: Sweep = pickle.load(sys.stdin.buffer)  # noqa: S301
    root = Path(work.root)
    base = root.with_name(root.name + "-base")
    assert save(work.tiny, 1).problems == ["", ""]
    root.rename(base)
    seen = []
    for injected in work.faults:
        shutil.copytree(base, root)
        seen.append(one(work, injected))
        shutil.rmtree(root)
    shutil.rmtree(base)
    sys.stdout.buffer.write(pickle.dumps(seen))


def one(work: Sweep, injected: Injected) -> Seen:
    """Save with the fault, then save again."""
    store = store_of(work)

    def prepare(rank: int) -> None:
        if rank == injected.rank:
            work.install(injected.fault)

    saved = save(work.tiny, 2, prepare, injected.grace)
    after = look(store, work.root)
    store.clean()
    following = save(work.tiny, 3)
    return Seen(saved=saved, after=after, next_saved=following, end=look(store, work.root))


def store_of(work: Sweep) -> Store:
    address = work.tiny.setups[0].store
    return ObjectStore(address) if "://" in address else LocalStore(address)


def look(store: Store, root: str) -> Found:
    """Read everything that the store lists."""
    names = list(store.names())
    exact = all(read_digests(store, name) == digests(int(name[5:])) for name in names)
    left = sorted(path.name for path in Path(root).iterdir() if path.name not in names)
    return Found(names, exact, left)


def save(
    tiny: Tiny, step: int, prepare: Callable[[int], Any] = lambda rank: None, grace: float = 10
) -> Saved:
    """Fork two writers."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(2)]
        pids = [_fork(tiny, step, rank, prepare, files[rank]) for rank in range(2)]
        fates = _reap(pids, grace)
        told = [json.loads(path.read_text()) if path.exists() else {} for path in files]
    return Saved(fates, [t.get("problem", "") for t in told], [t.get("warnings", []) for t in told])


def _fork(tiny: Tiny, step: int, rank: int, prepare: Callable[[int], Any], tell: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work = job(step, f"attempt{step}")
        prepare(rank)
        outcome = carry_out(tiny.setups[rank], work, tiny.arena(rank, step))
        injection.unlimit_file_size()
        tell.write_text(outcome.model_dump_json())
        code = 0
    finally:
        os._exit(code)


def _reap(pids: list[int], grace: float) -> list[int]:
    fates: dict[int, int] = {}
    deadline = None
    while len(fates) < len(pids):
        for pid in set(pids) - set(fates):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                fates[pid] = os.waitstatus_to_exitcode(status)
        if pids[1] in fates:
            deadline = deadline or time.monotonic() + grace
            if time.monotonic() > deadline and pids[0] not in fates:
                os.kill(pids[0], signal.SIGKILL)
        time.sleep(0.0005)
    return [fates[pid] for pid in pids]


if __name__ == "__main__":
    # The module runs under its own name, which pickles need.
    from tests.support import sweep as this

    this.main()
