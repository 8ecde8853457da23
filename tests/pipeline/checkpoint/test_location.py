"""Location of a run's checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.checkpoint import location
from pipeline.checkpoint.manifest import MANIFEST
from pipeline.contracts.metrics import Metrics
from pipeline.errors import CheckpointError, ResumeRefused
from pipeline.execution.rundir import saved_step


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
        place = location.default(tmp_path, training)
        folder = Path(place, f"step-{step:08d}")
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text("{}")
        location.remember(tmp_path, place, training)
    file = tmp_path / "metrics.jsonl"
    Metrics(file).write_training({"step": 21, "loss": 1.0})
    assert (saved_step(file), saved_step(file, "chat")) == (20, 5)
    Metrics(file, "chat").write_training({"step": 6, "loss": 1.0})
    assert (saved_step(file), saved_step(file, "")) == (5, 20)
