"""Checkpoints of training ranks: killed and failing writers, damaged files, folders that only some
ranks see."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.damage import flip
from tests.support.faulty_ranks import FIRST, SECOND, Victim, resume, save_twice
from tests.support.injection import Fault
from tests.support.processes import RankFailed, run_ranks
from tests.support.state import Setting
from tests.support.zero import has_libaio

OLD, NEW = f"step-{FIRST:08d}", f"step-{SECOND:08d}"
FSDP = Setting(wrap="fsdp full", checkpoint={"keep": None})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with two checkpoints, and their contents."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_twice, 2, str(folder), FSDP)
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """Return a copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def state(folder: Path, step: int) -> dict[str, str]:
    """Return the engine's state at a step."""
    found: dict[str, str] = json.loads((folder / f"state-{step}.json").read_text())
    return found


def test_all_ranks_fall_back_together_when_one_meets_damage(run: Path) -> None:
    """Rank 0 reads no byte of the damaged file."""
    broken = run / "checkpoints" / NEW / "rank-00001.safetensors"
    flip(broken)
    data = broken.read_bytes()
    for told in run_ranks(resume, 2, [str(run)], FSDP):
        assert told["step"] == FIRST
        assert told["state"] == state(run, FIRST)
        assert told["newest"] == str(run / "checkpoints" / NEW)
    aside = run / "checkpoints" / f"{NEW}.damaged-1" / broken.name
    assert aside.read_bytes() == data


@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize(
    "wrap", ["ddp", "zero2 offload", "zero3", pytest.param("zero3 nvme", marks=pytest.mark.full)]
)
def test_nothing_is_left_of_a_checkpoint_that_was_loaded_in_part(wrap: str, tmp_path: Path) -> None:
    if wrap == "zero3 nvme" and not has_libaio():
        pytest.skip("NVMe offload needs libaio")
    model = {"vocab_size": 6001, "hidden_size": 96} if wrap == "zero3 nvme" else {}
    setting = Setting(
        wrap=wrap, nvme=str(tmp_path / "nvme"), model=model, checkpoint={"keep": None}
    )
    run_ranks(save_twice, 2, str(tmp_path), setting)
    flip(tmp_path / "checkpoints" / NEW / "rank-00001.safetensors")
    for told in run_ranks(resume, 2, [str(tmp_path)], setting):
        assert (told["step"], told["state"]) == (FIRST, state(tmp_path, FIRST))
        assert told["newest"] == str(tmp_path / "checkpoints" / NEW)


def test_no_silent_start_from_scratch(run: Path) -> None:
    """The second attempt does not start from scratch either."""
    for name in (OLD, NEW):
        (run / "checkpoints" / name / "manifest.json").unlink()
    places = [f"{OLD}/manifest.json: missing", f"{NEW}.damaged-1: damaged"]
    for place in places:
        with pytest.raises(RankFailed) as told:
            run_ranks(resume, 2, [str(run)], FSDP)
        assert f"no checkpoint can be used: {run / 'checkpoints' / place} (" in str(told.value)
        assert "to train from the start, start a new run" in str(told.value)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == [f"{OLD}.damaged-1", f"{NEW}.damaged-1"]


def test_no_silent_start_where_all_checkpoints_are_gone(run: Path) -> None:
    """A disk that was not mounted looks like this."""
    (run / "checkpoints").rename(run / "unmounted")
    with pytest.raises(RankFailed) as told:
        run_ranks(resume, 2, [str(run)], FSDP)
    assert f"this run saved checkpoints in {run / 'checkpoints'}, and now there are" in str(
        told.value
    )
    assert f"delete {run / 'checkpoints.at'}" in str(told.value)
    (run / "checkpoints.at").unlink()
    assert run_ranks(resume, 2, [str(run)], FSDP)[0]["step"] == 0


def test_ranks_that_write_to_different_places(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with pytest.raises(RankFailed) as told:
        run_ranks(resume, 2, [str(run), str(other)], FSDP)
    assert "rank 1 does not see what rank 0 writes to " in str(told.value)
    assert "checkpoints must be on a file system that all nodes share" in str(told.value)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [OLD, NEW]
    assert list((other / "checkpoints").iterdir()) == []


KILLED = re.escape("the process that writes rank {rank}'s checkpoints ended (SIGKILL)")
POINTS = [
    pytest.param(
        True, 0, Fault(root="", at=2, only="rename", how="before"), FIRST, id="uncommitted"
    ),
    pytest.param(
        False, 0, Fault(root="", at=2, only="rename", how="after"), SECOND, id="committed"
    ),
    pytest.param(True, 1, Fault(root="", at=3, only="pwrite", how="half"), FIRST, id="mid-file"),
    pytest.param(False, 1, Fault(root="", at=0, only="fsync", how="before"), FIRST, id="unsynced"),
]


@pytest.mark.parametrize(("asynchronous", "rank", "fault", "step"), POINTS)
def test_a_killed_writer(
    tmp_path: Path, saved: Path, asynchronous: bool, rank: int, fault: Fault, step: int
) -> None:
    fault.root = str(tmp_path / "checkpoints" / NEW)
    setting = Setting(wrap="fsdp full", checkpoint={"keep": None, "asynchronous": asynchronous})
    with pytest.raises(RankFailed, match=KILLED.replace(r"\{rank\}", str(rank))):
        run_ranks(save_twice, 2, str(tmp_path), setting, Victim(rank, fault))
    for told in run_ranks(resume, 2, [str(tmp_path)], setting):
        assert told["step"] == step
        assert told["state"] == state(saved, step)
        assert told["newest"] == str(tmp_path / "checkpoints" / f"step-{step + 1:08d}")
    left = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert sorted(left) == [f"step-{number:08d}" for number in range(FIRST, step + 2)]


def test_a_full_disk_of_one_rank(tmp_path: Path, saved: Path) -> None:
    fault = Fault(
        root=str(tmp_path / "checkpoints" / NEW), at=0, only="posix_fallocate", how="ENOSPC"
    )
    with pytest.raises(RankFailed) as told:
        run_ranks(save_twice, 2, str(tmp_path), FSDP, Victim(1, fault))
    problem = f"No space left on device: {fault.root}.tmp-"
    assert f"{NEW} could not be saved: {problem}" in str(told.value)
    assert "rank-00001.safetensors (earlier checkpoints are unchanged)" in str(told.value)
    for told_rank in run_ranks(resume, 2, [str(tmp_path)], FSDP):
        assert (told_rank["step"], told_rank["state"]) == (FIRST, state(saved, FIRST))
