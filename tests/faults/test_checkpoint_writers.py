"""Writers that are killed at every file operation of a save, and those whose operations fail: full
disks, quotas, broken disks."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.injection import Fault, limit_file_size
from tests.support.sweep import NEW, NEXT, OLD, REPOSITORY, Found, Injected, Recorded, Seen, record
from tests.support.tier import times

ERRORS = ("ENOSPC", "EIO", "EDQUOT")
GRACE = 0.4
"""Rank 0 ends by itself, unless rank 1 could not even report."""


@pytest.fixture(scope="module", params=["sharded", "full"])
def recorded(request: pytest.FixtureRequest, memory: Path) -> Recorded:
    """Return two writers of either layout with their operations recorded."""
    folder = memory / request.param
    folder.mkdir()
    return record(folder, request.param)


def test_a_save_is_what_we_believe_it_is(recorded: Recorded) -> None:
    """The sweep below covers each kind of operation, in the order that survives a crash."""
    first, commit = recorded.operations[0], recorded.points[0]
    kinds = {line.split()[0] for line in first}
    assert kinds >= {"mkdir", "open", "pwrite", "fsync", "close", "rename", "unlink", "rmdir"}
    manifest = first.index(f"rename {recorded.attempt / 'manifest.json.partial'}")
    parent = first.index(f"open {recorded.root}", commit)
    forget = recorded.place(0, f"rename {recorded.root / OLD}")
    assert manifest < commit < parent < forget
    assert first[manifest - 1] == f"open {recorded.attempt}"
    assert first[manifest + 1].startswith("fsync ")
    assert first[parent + 1].startswith("fsync ")
    written = [place for place, line in enumerate(first) if line.startswith("pwrite ")]
    assert max(written) < manifest
    for rank in range(2):  # written data is forced to disk before its file is closed
        assert sum(line.startswith("rename ") for line in recorded.operations[rank]) >= 2


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_at_every_operation(recorded: Recorded, rank: int) -> None:
    assert recorded.require_killed_anywhere(rank, recorded.points[rank], 16) >= 40


def require_untouched(recorded: Recorded, fault: Fault, seen: Seen, problem: str) -> None:
    """Require that nothing is committed, the rank's error says what failed and where, and the next
    save succeeds."""
    assert seen.after.names == [OLD], fault
    assert seen.after.exact, fault
    said = f"{os.strerror(getattr(errno, fault.how))}: {recorded.attempt}"
    assert problem.startswith(said), fault
    assert seen.next_saved.problems == ["", ""], fault
    assert seen.end == Found([NEXT], True, []), fault


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_operation_commits_nothing_and_is_reported(recorded: Recorded, rank: int) -> None:
    chance, first = random.Random(rank), recorded.place(rank, f"mkdir {recorded.attempt}") + 1
    faults = [
        recorded.fault(
            at=chance.randint(first, recorded.points[rank]), how=chance.choice(ERRORS),
            lasting=chance.random() < 0.5,
        )
        for _ in range(times(quick=6, full=25))
    ]  # fmt: skip
    found = recorded.sweep([Injected(rank, fault, GRACE) for fault in faults])
    for fault, seen in zip(faults, found, strict=True):
        problem = seen.saved.problems[rank]
        require_untouched(recorded, fault, seen, problem)
        if rank == 1 and seen.saved.fates[0] == 0:
            assert seen.saved.problems[0] == f"rank 1: {problem}"
            assert seen.after.left == []


@pytest.mark.parametrize("rank", [0, 1])
def test_files_that_may_not_grow(recorded: Recorded, rank: int) -> None:
    """The limit on file sizes makes the system fail: each file over the limit fails, and every
    smaller one succeeds."""
    chance = random.Random(rank)
    sizes = [0, *(chance.randrange(20_000) for _ in range(times(quick=4, full=12)))]
    faults = [recorded.fault(at=size, how="EFBIG") for size in sizes]
    found = recorded.sweep([Injected(rank, fault, GRACE) for fault in faults], limit_file_size)
    for fault, seen in zip(faults, found, strict=True):
        require_untouched(recorded, fault, seen, seen.saved.problems[rank])


def test_a_failure_after_the_rename_leaves_a_whole_checkpoint(recorded: Recorded) -> None:
    """The failure is reported because the rename may not survive a power loss."""
    parent = recorded.points[0] + 1
    faults = [recorded.fault(at=place, how="EIO") for place in (parent, parent + 1)]
    for seen in recorded.sweep([Injected(0, fault, GRACE) for fault in faults]):
        assert seen.saved.problems[0] == f"Input/output error: {recorded.root}"
        assert seen.after == Found([OLD, NEW], True, [])
        assert seen.end == Found([NEXT], True, [])


def test_a_failing_deletion_is_a_warning(recorded: Recorded) -> None:
    forget = recorded.place(0, f"rename {recorded.root / OLD}")
    faults = [
        recorded.fault(at=place, how="EIO")
        for place, operation in enumerate(recorded.operations[0])
        if place >= forget and not operation.startswith("close")
    ]
    found = recorded.sweep([Injected(0, fault, GRACE) for fault in faults])
    for fault, seen in zip(faults, found, strict=True):
        [warning] = seen.saved.warnings[0]
        where = f"{recorded.root / OLD} cannot be deleted: Input/output error"
        assert (warning, seen.saved.problems[0]) == (where, ""), fault
        assert seen.after.names == ([OLD, NEW] if fault.at == forget else [NEW])
        assert seen.after.exact
        assert seen.end == Found([NEXT], True, [])


def can_mount() -> bool:
    """Return whether this user may mount a file system."""
    unshare = shutil.which("unshare")
    command = [unshare, "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return unshare is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces that may mount")
def test_disks_of_many_sizes(tmp_path: Path) -> None:
    """On a disk without room for the second checkpoint the first stays unchanged and the unfinished
    one is removed."""
    command = ["unshare", "-Urm", sys.executable, "-m", "tests.support.small_disks", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, check=True, cwd=REPOSITORY, env=environment, stdout=-1, text=True
    )
    told = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert len(told) == 12
    assert {kind for kind, _ in told} == {"saved", "full"}
    for kind, problem in told:
        if kind == "full":
            assert "No space left on device: " in problem
            assert str(tmp_path / f"{NEW}.tmp-") in problem
