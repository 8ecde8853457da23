"""When reference cycles are collected in a training."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from stages.train.loop import COLLECTED, collect_after, collected


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    """Collect by itself around each test, and at nothing else's bidding."""
    assert gc.isenabled()
    yield
    assert gc.isenabled()


def lost() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


def test_cycles_are_collected_at_chosen_steps_and_nowhere_else() -> None:
    with collected(as_usual=False):
        cycle = lost()
        for number in range(1, COLLECTED):
            assert [[] for _ in range(1000)]  # more than Python's threshold
            collect_after(number)
        assert cycle() is not None
        collect_after(COLLECTED)
        assert cycle() is None


def test_what_a_start_has_frozen_stays_so() -> None:
    """Otherwise each collection at the end of a run walks all imported modules."""
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collected(as_usual=False), collected(as_usual=True):
        pass
    # What nobody holds any longer still goes, frozen or not: other threads drop a few.
    assert frozen - 100 < gc.get_freeze_count() <= frozen
    assert frozen > 100_000


def test_a_pause_collects_as_python_does_and_leaves_nothing_behind() -> None:
    with collected(as_usual=False):
        old = lost()
        assert not gc.isenabled()
        with collected(as_usual=True):
            assert gc.isenabled()
        assert not gc.isenabled()
        assert old() is None


def test_an_error_gives_collection_back() -> None:
    with pytest.raises(KeyError), collected(as_usual=False), collected(as_usual=True):
        raise KeyError
