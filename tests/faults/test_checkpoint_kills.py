"""Writers that are killed at every file operation of a save."""

from __future__ import annotations

import pytest

from tests.support.injection import Fault
from tests.support.recorded import ABANDONED, NEW, NEXT, OLD, PATIENT, Recorded
from tests.support.sweep import Found, Injected
from tests.support.tier import spread


def hows(operation: str) -> list[str]:
    return ["before", "half", "after"] if operation.startswith("pwrite") else ["before", "after"]


def test_a_save_is_what_we_believe_it_is(recorded: Recorded) -> None:
    """The sweep below covers each kind of operation, in the order that survives a crash."""
    kinds = {line.split()[0] for line in recorded.operations[0]}
    assert kinds >= {"mkdir", "open", "pwrite", "fsync", "close", "rename", "unlink", "rmdir"}
    first = recorded.operations[0]
    manifest = first.index(f"rename {recorded.attempt / 'manifest.json.partial'}")
    parent = first.index(f"open {recorded.root}", recorded.commit)
    forget = recorded.place(0, f"rename {recorded.root / OLD}")
    assert manifest < recorded.commit < parent < forget
    assert first[manifest - 1] == f"open {recorded.attempt}"
    assert first[manifest + 1].startswith("fsync ")
    assert first[parent + 1].startswith("fsync ")
    written = [place for place, line in enumerate(first) if line.startswith("pwrite ")]
    assert max(written) < manifest
    for rank in range(2):  # written data is forced to disk before its file is closed
        assert sum(line.startswith("rename ") for line in recorded.operations[rank]) >= 2


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_at_every_operation(recorded: Recorded, rank: int) -> None:
    point = recorded.commit if rank == 0 else recorded.report
    faults, passed = [], []
    for number, operation in enumerate(recorded.operations[rank]):
        for how in hows(operation):
            passed.append(number > point or (number == point and how == "after"))
            grace = PATIENT if rank == 0 or passed[-1] else ABANDONED
            fault = Fault(root=str(recorded.root), at=number, how=how)
            faults.append(Injected(rank, fault, grace))
    assert len(faults) >= 40
    chosen = spread(list(zip(faults, passed, strict=True)), 16)
    found = recorded.sweep([fault for fault, _ in chosen])
    for ((_, fault, _), new), seen in zip(chosen, found, strict=True):
        assert seen.saved.fates[rank] == -9, fault
        assert seen.after.exact, fault
        assert seen.after.names[-1:] == [NEW if new else OLD], fault
        assert seen.next_saved.problems == ["", ""], fault
        assert seen.end == Found([NEXT], True, []), fault
