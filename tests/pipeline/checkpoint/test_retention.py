"""The checkpoints that are kept, and their expected number."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint.local_store import LocalStore
from pipeline.checkpoint.manifest import MANIFEST
from pipeline.checkpoint.retention import Retention, expected_count, purge
from pipeline.checkpoint.store import step_name, step_number, steps_in_order
from pipeline.contracts.training import TrainingLength
from tests.support.tiny_store import Tiny, write

LOSSES = {1: 3.0, 2: None, 3: 1.0, 4: 2.0, 5: 1.0, 6: float("nan"), 7: 4.0, 8: None}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Return a store with eight checkpoints."""
    tiny = Tiny(str(tmp_path))
    for step, loss in LOSSES.items():
        assert write(tiny, step, loss=loss).problem == ""
    return LocalStore(tmp_path)


def steps(store: LocalStore) -> list[int]:
    return [step_number(name) or 0 for name in store.names()]


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), [1, 2, 3, 4, 5, 6, 7, 8]),
        (Retention(every=4), [1, 2, 3, 4, 5, 6, 7, 8]),
        (Retention(last=1), [8]),
        (Retention(last=3), [6, 7, 8]),
        (Retention(last=99), [1, 2, 3, 4, 5, 6, 7, 8]),
        (Retention(last=2, every=3), [3, 6, 7, 8]),
        (Retention(last=1, best=1), [3, 8]),
        (Retention(last=1, best=3), [3, 4, 5, 8]),
        (Retention(last=1, best=99), [1, 3, 4, 5, 7, 8]),
        (Retention(last=1, every=2, best=1), [2, 3, 4, 6, 8]),
    ],
)
def test_what_is_kept(store: LocalStore, retention: Retention, kept: list[int]) -> None:
    assert purge(store, retention) == []
    assert steps(store) == kept


def test_a_checkpoint_that_cannot_be_read_is_not_the_best(store: LocalStore) -> None:
    Path(store.locate(step_name(3), MANIFEST)).write_bytes(b"")
    assert purge(store, Retention(last=1, best=1)) == []
    assert steps(store) == [5, 8]


def test_what_is_put_aside_is_kept_and_not_counted(store: LocalStore) -> None:
    store.quarantine(step_name(8))
    store.quarantine(step_name(1))
    assert purge(store, Retention(last=2)) == []
    assert steps(store) == [6, 7]
    assert [Path(place).name for place in store.quarantined()] == [
        "step-00000001.damaged-1",
        "step-00000008.damaged-1",
    ]


def test_only_a_newer_commit_deletes(tmp_path: Path) -> None:
    tiny = Tiny(str(tmp_path), retention=Retention(last=1))
    write(tiny, 1)
    (tmp_path / "step-00000002.tmp-attempt2").write_text("in the way")
    failed = write(tiny, 2)
    assert failed.problem.startswith("File exists: ")
    assert steps(LocalStore(tmp_path)) == [1]
    assert write(tiny, 2, identity="again").problem == ""
    assert steps(LocalStore(tmp_path)) == [2]


@given(st.sets(st.integers(0, 10**10)))
def test_names_are_in_the_order_of_steps(found: set[int]) -> None:
    """Steps may have more digits than names usually have."""
    names = [*map(step_name, found), "step-1", "step-00000001.tmp-x", "other"]
    assert steps_in_order(names) == [step_name(step) for step in sorted(found)]


def test_steps_that_no_training_has() -> None:
    assert step_number(f"step-{10**17}") == 10**17
    assert [step_number(f"step-{n}") for n in (10**18, 10**30, "9" * 5000, "٣" * 8)] == [None] * 4


@pytest.mark.parametrize(
    ("retention", "every", "length", "number"),
    [
        (Retention(last=2), None, {}, 1),  # the last step's
        (Retention(last=2), 100, {}, 3),  # the newest two, and the third while it is written
        (Retention(last=2), 600, {}, 2),  # 600 and 1000 are the only ones
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
        # Evaluations at 50, 150, ... may be the newest, so that all ten except the last are older.
        (Retention(last=2, every=100, best=1), 100, {"eval_every": 50}, 2 + 9 + 1 + 1),
    ],
)
def test_by_hand(retention: Retention, every: int | None, length: Any, number: int) -> None:
    found = expected_count(retention, every, TrainingLength(steps=1000, **length))
    assert found == number


@pytest.mark.parametrize(
    ("retention", "every", "number"),
    [
        (Retention(last=2), None, 1),
        (Retention(last=2), 100, 3),
        (Retention(), 100, 2),
        (Retention(last=2, every=250), 100, 3),
        (Retention(last=2, best=1), None, 4),
    ],
)
def test_of_a_training_whose_steps_nobody_knows(
    retention: Retention, every: int | None, number: int
) -> None:
    assert expected_count(retention, every, TrainingLength(eval_every=50)) == number


@pytest.mark.parametrize(
    ("retention", "every", "epoch", "number"),
    [
        (Retention(), "0.5 epochs", Fraction(2001, 10), 10),  # at 101, 201, 301, ..., 901 and 1000
        (Retention(), "1/3 epochs", Fraction(300), 10),
        (Retention(last=2), "1/3 epochs", Fraction(300), 3),
        (Retention(last=2), "4 epochs", Fraction(300), 1),
        (Retention(last=2), "0.5 epochs", None, 3),  # somewhere in these steps
        (Retention(), "0.5 epochs", None, 2),
    ],
)
def test_parts_of_an_epoch(
    retention: Retention, every: str, epoch: Fraction | None, number: int
) -> None:
    assert expected_count(retention, every, TrainingLength(steps=1000, epoch=epoch)) == number


class Names:
    """A store that consists of names."""

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
    assert expected_count(retention, every, TrainingLength(steps=steps)) == most
