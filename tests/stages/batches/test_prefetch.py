"""Items that threads prepare ahead: their order, errors, and an error that nobody asks for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from stages.batches.prefetch import Prefetch


def counting(start: int) -> Iterator[int]:
    """Yield numbers, and raise at 3."""
    for number in range(start, 100):
        if number == 3:
            raise OSError("broken")
        yield number


def test_items_come_in_order_and_are_prepared_ahead() -> None:
    prepared, ahead = [], threading.Event()

    def prepare(key: int) -> int:
        prepared.append(key)
        if key == 2:
            ahead.set()
        return key * key

    items = Prefetch(1, prepare, lambda key: iter(range(key, 100)))
    assert items.take(0) == 0
    assert ahead.wait(10)
    assert [items.take(key) for key in (1, 2, 3)] == [1, 4, 9]
    assert items.take(50) == 2500  # another place, as after a skipped batch
    items.close()
    assert prepared[:4] == [0, 1, 2, 3]


def test_an_error_in_looking_ahead_is_raised_when_it_is_asked_for() -> None:
    items = Prefetch(1, lambda key: key, counting)
    assert [items.take(key) for key in (0, 1, 2)] == [0, 1, 2]
    with pytest.raises(OSError, match="broken"):
        items.take(3)
    assert items.take(4) == 4
    items.close()


def test_an_error_of_an_item_is_raised_in_its_place() -> None:
    def prepare(key: int) -> int:
        if key == 1:
            raise ValueError("no such sample")
        return key

    items = Prefetch(2, prepare, lambda key: iter(range(key, 100)))
    assert items.take(0) == 0
    with pytest.raises(ValueError, match="no such sample"):
        items.take(1)
    assert items.take(2) == 2
    items.close()
