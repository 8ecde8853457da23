"""Writers whose file operations fail: full disks, quotas, broken disks."""

from __future__ import annotations

import errno
import os
import random

import pytest

from tests.support.injection import Fault
from tests.support.recorded import NEXT, OLD, Recorded
from tests.support.sweep import Found, Injected

ERRORS = ("ENOSPC", "EIO", "EDQUOT")
GRACE = 2.0
"""Rank 0 ends by itself, unless rank 1 could not even report."""
COUNT = 40


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_operation_commits_nothing_and_is_told(recorded: Recorded, rank: int) -> None:
    chance = random.Random(rank)
    operations = recorded.operations[rank]
    last = recorded.commit if rank == 0 else len(operations) - 1
    made = range(len(operations))[operations.index(f"mkdir {recorded.attempt}") + 1 : last + 1]
    faults = [
        Fault(
            root=str(recorded.root),
            at=chance.choice(made),
            how=chance.choice(ERRORS),
            lasting=chance.random() < 0.5,
        )
        for _ in range(COUNT)
    ]
    found = recorded.sweep([Injected(rank, fault, GRACE) for fault in faults])
    for fault, seen in zip(faults, found, strict=True):
        assert seen.after.names == [OLD], fault
        assert seen.after.exact, fault
        problem = seen.saved.problems[rank]
        text = os.strerror(getattr(errno, fault.how))
        assert problem.startswith(f"{text}: {recorded.attempt}"), (fault, problem)
        if rank == 1 and seen.saved.fates[0] == 0:
            assert seen.saved.problems[0] == f"rank 1: {problem}"
            assert seen.after.left == []
        assert seen.next_saved.problems == ["", ""], fault
        assert seen.end == Found([NEXT], True, []), fault
