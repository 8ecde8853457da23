"""Location of a run's checkpoints, and those that stay."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint import location
from pipeline.checkpoint.location import Retention, expected_count, purge
from pipeline.checkpoint.manifest import MANIFEST
from pipeline.checkpoint.store import LocalStore, step_name, step_number, steps_in_order
from pipeline.contracts.metrics import Metrics
from pipeline.contracts.training import TrainingLength
from pipeline.errors import CheckpointError, ResumeRefused
from pipeline.execution.rundir import saved_step
from tests.support.tiny_store import Tiny, write


def test_nothing_saved_nothing_known(tmp_path: Path) -> None:
    assert location.known(tmp_path) is None
    location.require_never_saved(tmp_path, "s3://bucket/run")
    (tmp_path / "checkpoints.at").write_text("")  # as a full disk leaves it
    assert location.known(tmp_path) is None


def test_an_address_is_remembered(tmp_path: Path) -> None:
    location.remember(tmp_path, "s3://bucket/run")
    assert location.known(tmp_path) == "s3://bucket/run"
    with pytest.raises(ResumeRefused, match="saved checkpoints in s3://bucket/run, and now there"):
        location.require_never_saved(tmp_path, "s3://bucket/run")
    with pytest.raises(ResumeRefused, match="in s3://bucket/run, and now there are none in /else"):
        location.require_never_saved(tmp_path, "/else")


def test_what_is_in_the_runs_folder_moves_with_it(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    location.remember(old, str(old / "checkpoints"))
    new = old.rename(tmp_path / "new")
    assert location.known(new) == str(new / "checkpoints")


def test_the_newest_checkpoint_is_known_before_training_tells_it(tmp_path: Path) -> None:
    assert location.newest_step(tmp_path) is None
    for step in (20, 30):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text("{}")
    assert location.newest_step(tmp_path) is None  # none of its own
    location.remember(tmp_path, str(tmp_path / "checkpoints"))
    assert location.newest_step(tmp_path) == 30
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write_training({"step": 20, "checkpoint_seconds": 1.0})
    assert saved_step(tmp_path / "metrics.jsonl") == 30
    location.remember(tmp_path, "s3://bucket/run")  # which is not asked
    assert location.newest_step(tmp_path) is None
    assert saved_step(tmp_path / "metrics.jsonl") == 20


def test_a_place_that_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoints\.at: No such file or directory"):
        location.remember(tmp_path / "gone", "s3://bucket/run")


def test_a_link_out_of_the_run_is_not_followed(tmp_path: Path) -> None:
    """Its target's content would be shown as the place."""
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "secret").write_text("s3cret")
    (run / "checkpoints.at").symlink_to(tmp_path / "secret")
    for look in (location.known, lambda run: location.remember(run, "/elsewhere")):
        with pytest.raises(CheckpointError, match=r"checkpoints.at: .*leads out of") as told:
            look(run)
        assert "s3cret" not in str(told.value)
    assert (tmp_path / "secret").read_text() == "s3cret"


def test_garbage_is_said_and_replaced_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "checkpoints.at").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"checkpoints.at: damaged: "):
        location.known(tmp_path)
    location.remember(tmp_path, "/elsewhere")
    assert location.known(tmp_path) == "/elsewhere"


def test_each_training_has_its_own_place(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    location.remember(run, location.address(run, None))
    before = (run / "checkpoints.at").read_bytes()
    assert before == b"checkpoints"  # as of a run that trains once
    location.remember(run, location.address(run, None, "chat"), "chat")
    location.remember(run, location.address(run, "s3://bucket/all/", "last"), "last")
    moved = run.rename(tmp_path / "moved")
    assert location.places(moved) == {
        "": str(moved / "checkpoints"),
        "chat": str(moved / "checkpoints-chat"),
        "last": "s3://bucket/all/run-last",
    }
    assert location.known(moved) == "s3://bucket/all/run-last"
    assert location.known(moved, "chat") == str(moved / "checkpoints-chat")
    location.require_never_saved(moved, "/else", "another")
    line = f"delete the line of `chat` in {moved / 'checkpoints.at'}"
    with pytest.raises(ResumeRefused, match=re.escape(line)):
        location.require_never_saved(moved, "/else", "chat")


def test_a_line_that_leads_out_of_the_folder_is_no_training(tmp_path: Path) -> None:
    (tmp_path / "checkpoints.at").write_text("checkpoints\n../.. checkpoints-../..\nchat /there")
    assert list(location.places(tmp_path)) == ["", "chat"]


def test_the_newest_step_is_of_the_training_that_has_written_last(tmp_path: Path) -> None:
    for training, step in (("", 20), ("chat", 5)):
        place = location.address(tmp_path, None, training)
        folder = Path(place, f"step-{step:08d}")
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text("{}")
        location.remember(tmp_path, place, training)
    file = tmp_path / "metrics.jsonl"
    Metrics(file).write_training({"step": 21, "loss": 1.0})
    assert (saved_step(file), saved_step(file, "chat")) == (20, 5)
    Metrics(file, "chat").write_training({"step": 6, "loss": 1.0})
    assert (saved_step(file), saved_step(file, "")) == (5, 20)


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


NEVER, LAST = Retention(), Retention(last=2)
EVALS = {"eval_every": 50}


@pytest.mark.parametrize(
    ("retention", "every", "length", "number"),
    [
        (LAST, None, {}, 1),  # the last step's
        (LAST, 100, {}, 3),  # the newest two, and the third while it is written
        (LAST, 600, {}, 2),  # 600 and 1000 are the only ones
        (NEVER, 100, {}, 10),
        (NEVER, 300, {}, 4),  # 300, 600, 900 and the last
        (NEVER, 100, {"saves_first": True}, 11),
        (NEVER, 100, {"eval_first": True}, 10),
        (Retention(best=1), 100, {"eval_first": True, "eval_every": 200}, 11),
        (Retention(last=2, every=250), 100, {}, 4),  # 500; 800, 900; and 1000 while it is written
        (Retention(last=2, every=200), 100, {}, 6),  # 200, 400, 600; 800, 900; and 1000
        (Retention(last=1, best=1), 100, {"eval_every": 100}, 3),
        (Retention(last=2, best=1), None, {"eval_every": 100}, 4),  # saved after evaluations too
        (Retention(best=1), 500, {"eval_every": 250}, 4),  # 250, 500, 750, 1000
        # Evaluations at 50, 150, ... may be the newest, so that all ten except the last are older.
        (Retention(last=2, every=100, best=1), 100, EVALS, 2 + 9 + 1 + 1),
        # Nobody knows the number of steps.
        (LAST, None, EVALS | {"steps": None}, 1),
        (LAST, 100, EVALS | {"steps": None}, 3),
        (NEVER, 100, EVALS | {"steps": None}, 2),
        (Retention(last=2, every=250), 100, EVALS | {"steps": None}, 3),
        (Retention(last=2, best=1), None, EVALS | {"steps": None}, 4),
        # Parts of an epoch.
        (NEVER, "0.5 epochs", {"epoch": Fraction(2001, 10)}, 10),  # 101, 201, ..., 901 and 1000
        (NEVER, "1/3 epochs", {"epoch": Fraction(300)}, 10),
        (LAST, "1/3 epochs", {"epoch": Fraction(300)}, 3),
        (LAST, "4 epochs", {"epoch": Fraction(300)}, 1),
        (LAST, "0.5 epochs", {"epoch": None}, 3),  # somewhere in these steps
        (NEVER, "0.5 epochs", {"epoch": None}, 2),
    ],
)
def test_by_hand(retention: Retention, every: int | str | None, length: Any, number: int) -> None:
    found = expected_count(retention, every, TrainingLength(**{"steps": 1000} | length))
    assert found == number


@given(
    st.integers(1, 40), st.integers(1, 12), st.none() | st.integers(1, 6),
    st.none() | st.integers(1, 12),
)  # fmt: skip
def test_as_many_are_there_at_once_as_are_counted(
    steps: int, every: int, last: int | None, for_good: int | None
) -> None:
    retention, there, most = Retention(last=last, every=for_good), list[str](), 0
    store: Any = SimpleNamespace(names=lambda: list(there), delete=there.remove)
    for step in sorted({steps, *range(every, steps, every)}):
        there.append(step_name(step))
        most = max(most, len(there))
        assert not purge(store, retention)
    assert expected_count(retention, every, TrainingLength(steps=steps)) == most
