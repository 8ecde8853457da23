"""What decides about another start."""

from __future__ import annotations

import pytest

from pipeline.distributed.settings import Attempts, Restarts
from pipeline.errors import RunFailed


def test_waits_grow_and_end() -> None:
    attempts = Attempts(Restarts(limit=3, backoff=2, max_backoff=5))
    died = RunFailed("x", restart="always")
    assert [attempts.wait_after(died, progressed=False) for _ in range(4)] == [2, 4, 5, None]
    assert attempts.wait_after(died, progressed=True) == 2
    assert attempts.number == 1


@pytest.mark.parametrize(
    ("restart", "progressed", "goes_on"),
    [("never", True, False), ("after progress", False, False), ("after progress", True, True)],
)
def test_what_another_start_may_help(restart: str, progressed: bool, goes_on: bool) -> None:
    error = RunFailed("x", restart=restart)  # type: ignore[arg-type]
    wait = Attempts(Restarts()).wait_after(error, progressed=progressed)
    assert (wait is not None) is goes_on


def test_restarts_can_be_off() -> None:
    error = RunFailed("x", restart="always")
    assert Attempts(Restarts(limit=0)).wait_after(error, progressed=True) is None
