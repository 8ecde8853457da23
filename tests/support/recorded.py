"""The operations of a save, so that each can be given a fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from pipeline.checkpoint.retention import Retention
from tests.support import injection
from tests.support.injection import Fault
from tests.support.sweep import Injected, Seen, Sweep, sweep
from tests.support.tiny_store import Tiny

OLD, NEW, NEXT = "step-00000001", "step-00000002", "step-00000003"
PATIENT = 20.0
"""Rank 0 ends by itself."""
ABANDONED = 0.01
"""Rank 0 waits for a report that never comes."""


@dataclasses.dataclass
class Recorded:
    """A place for checkpoints, and each rank's operations of an undisturbed save there."""

    tiny: Tiny
    root: Path
    operations: list[list[str]]

    def sweep(
        self, faults: list[Injected], install: Callable[[Fault], None] = injection.install
    ) -> list[Seen]:
        return sweep(Sweep(tiny=self.tiny, root=str(self.root), faults=faults, install=install))

    def place(self, rank: int, operation: str) -> int:
        """Return the number of an operation."""
        return self.operations[rank].index(operation)

    @property
    def attempt(self) -> Path:
        """Return the folder in which the new checkpoint is written."""
        return self.root / f"{NEW}.tmp-attempt2"

    @property
    def commit(self) -> int:
        """Return rank 0's operation that makes the checkpoint appear."""
        return self.place(0, f"rename {self.attempt}")

    @property
    def report(self) -> int:
        """Return rank 1's operation after which rank 0 continues without it."""
        return self.place(1, f"rename {self.attempt / 'rank-00001.report.partial'}")


def record(folder: Path, format: str) -> Recorded:
    """Save twice, keeping one checkpoint."""
    root = folder / "store"
    tiny = Tiny(str(root), format, Retention(last=1))
    logs = [folder / f"log-{rank}" for rank in range(2)]
    faults = [
        Injected(rank, Fault(root=str(root), log=str(logs[rank])), PATIENT) for rank in range(2)
    ]
    for seen in sweep(Sweep(tiny=tiny, root=str(root), faults=faults)):
        assert (seen.saved.problems, seen.after.names) == (["", ""], [NEW])
    return Recorded(tiny, root, [log.read_text().splitlines() for log in logs])
