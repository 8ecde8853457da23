"""How many checkpoints there will be is how many there are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint.retention import Retention, expected_count, purge
from pipeline.checkpoint.store import step_name
from pipeline.contracts.training import TrainingLength


@pytest.mark.parametrize(
    ("retention", "every", "length", "number"),
    [
        (Retention(last=2), None, {}, 1),  # that of the last step
        (Retention(last=2), 100, {}, 3),  # the newest two, and the third while it is written
        (Retention(last=2), 600, {}, 2),  # 600 and 1000 are all that there will ever be
        (Retention(), 100, {}, 10),
        (Retention(), 300, {}, 4),  # 300, 600, 900 and the last
        (Retention(), 100, {"saves_first": True}, 11),
        (Retention(), 100, {"eval_first": True}, 10),
        (Retention(best=1), 100, {"eval_first": True, "eval_every": 200}, 11),
        (Retention(last=2, every=250), 100, {}, 4),  # 500; 800, 900; and 1000 while it is written
        (Retention(last=2, every=200), 100, {}, 6),  # 200, 400, 600; 800, 900; and 1000
        (Retention(last=1, best=1), 100, {"eval_every": 100}, 3),
        (Retention(last=2, best=1), None, {"eval_every": 100}, 4),  # saved after evaluations too
        (Retention(best=1), 500, {"eval_every": 250}, 4),  # 250, 500, 750, 1000
        # Evaluations at 50, 150, ... may be the newest, so that all ten but the last are older.
        (Retention(last=2, every=100, best=1), 100, {"eval_every": 50}, 2 + 9 + 1 + 1),
    ],
)
def test_by_hand(retention: Retention, every: int | None, length: Any, number: int) -> None:
    found = expected_count(retention, every, TrainingLength(steps=1000, **length))
    assert (found.number, found.further) == (number, None)


@pytest.mark.parametrize(
    ("retention", "every", "said"),
    [
        (Retention(last=2), None, "1 checkpoint"),
        (Retention(last=2), 100, "3 checkpoints"),
        (Retention(), 100, "2 checkpoints, and one more every 100 steps"),
        (Retention(last=2, every=250), 100, "3 checkpoints, and one more every 500 steps"),
        (Retention(last=2, best=1), None, "4 checkpoints"),
    ],
)
def test_of_a_training_whose_steps_nobody_knows(
    retention: Retention, every: int | None, said: str
) -> None:
    assert str(expected_count(retention, every, TrainingLength(eval_every=50))) == said


class Names:
    """A store of names."""

    def __init__(self) -> None:
        self.there: list[str] = []

    def names(self) -> list[str]:
        return list(self.there)

    def delete(self, name: str) -> None:
        self.there.remove(name)


@given(
    st.integers(1, 40), st.integers(1, 12), st.none() | st.integers(1, 6),
    st.none() | st.integers(1, 12),
)  # fmt: skip
def test_as_many_are_there_at_once_as_are_counted(
    steps: int, every: int, last: int | None, for_good: int | None
) -> None:
    retention, store, most = Retention(last=last, every=for_good), Names(), 0
    for step in sorted({steps, *range(every, steps, every)}):
        store.there.append(step_name(step))
        most = max(most, len(store.there))
        assert not purge(store, retention)  # type: ignore[arg-type]
    assert expected_count(retention, every, TrainingLength(steps=steps)).number == most
