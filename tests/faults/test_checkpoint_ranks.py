"""Checkpoints of training ranks: killed and failing writers, damaged files, folders that only some
ranks see, and ranks that read wrong bytes."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint import store as local_store
from pipeline.checkpoint.manifest import MANIFEST
from pipeline.checkpoint.restore import Restoration
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from pipeline.errors import CheckpointError, StageError
from stages.checkpoint.sharded import ShardedCheckpoint
from tests.support.damage import flip
from tests.support.injection import Fault, infect
from tests.support.processes import RankFailed, run_ranks
from tests.support.runs import context
from tests.support.state import ADAMW, Setting, checkpoint_stage, digest, make_engine, train
from tests.support.tiny_store import Tiny, write
from tests.support.zero import has_libaio

FIRST, SECOND = 2, 3
"""Steps with a checkpoint after them."""
OLD, NEW = f"step-{FIRST:08d}", f"step-{SECOND:08d}"
FSDP = Setting(wrap="fsdp full", checkpoint={"keep": None})
SAME_STORE = "checkpoints must be on a file system that all nodes share"
Victim = tuple[int, Fault]
"""A rank, and the fault of its writer."""


def save_twice(
    dist: DistContext, folder: str, setting: Setting, victim: Victim | None = None
) -> None:
    """Train and save twice; write each saved state to a file."""
    if victim is not None and dist.rank == victim[0]:
        infect(folder, victim[1])
    ctx = context(dist, folder)
    engine = make_engine(ctx, setting)
    checkpoints = ShardedCheckpoint(**setting.checkpoint).run(ctx, engine)
    for begin, end in ((0, FIRST), (FIRST, SECOND)):
        train(engine, begin, end)
        state = digest(engine, dist)
        if dist.is_main:
            Path(folder, f"state-{end}.json").write_text(json.dumps(state))
        checkpoints.save(Progress(step=end, samples=12 * end, lineage={"seed": 7}))
    checkpoints.finish()
    checkpoints.close()
    engine.close()


def resume(dist: DistContext, folders: list[str], setting: Setting) -> dict[str, Any]:
    """Restore from the rank's own folder, digest the state, train a step, save."""
    ctx = context(dist, folders[dist.rank % len(folders)])
    engine = make_engine(ctx, setting)
    checkpoints = ShardedCheckpoint(**setting.checkpoint).run(ctx, engine)
    progress = checkpoints.restore(lambda progress: None)
    restored = digest(engine, dist)
    step = 0 if progress is None else progress.step
    train(engine, step, step + 1)
    checkpoints.save(Progress(step=step + 1))
    newest = checkpoints.finish()
    checkpoints.close()
    engine.close()
    return {"step": step, "state": restored, "newest": newest}


def resume_all(dist: DistContext, folders: list[str], setting: Setting) -> list[dict[str, Any]]:
    return [resume(dist, [folder], setting) for folder in folders]


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


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


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


def save_damage_resume(dist: DistContext, folder: str, wraps: list[str]) -> list[dict[str, Any]]:
    found = []
    for wrap in wraps:
        place = Path(folder, wrap)
        model = {"vocab_size": 6001, "hidden_size": 96} if wrap == "zero3 nvme" else {}
        kept = {"keep": None}
        setting = Setting(wrap=wrap, nvme=str(place / "nvme"), model=model, checkpoint=kept)
        save_twice(dist, str(place), setting)
        if dist.is_main:
            flip(place / "checkpoints" / NEW / "rank-00001.safetensors")
        dist.barrier()
        found.append(resume(dist, [str(place)], setting))
    return found


@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize(
    "wraps",
    [
        ["ddp", "zero2 offload", "zero3"],
        pytest.param(["zero3 nvme"], marks=[
            pytest.mark.full,
            pytest.mark.skipif(not has_libaio(), reason="NVMe offload needs libaio"),
        ]),
    ],
)  # fmt: skip
def test_nothing_is_left_of_a_checkpoint_that_was_loaded_in_part(
    wraps: list[str], tmp_path: Path
) -> None:
    for found in run_ranks(save_damage_resume, 2, str(tmp_path), wraps):
        for wrap, told in zip(wraps, found, strict=True):
            place = tmp_path / wrap
            assert (told["step"], told["state"]) == (FIRST, state(place, FIRST))
            assert told["newest"] == str(place / "checkpoints" / NEW)


def test_no_silent_start_from_scratch(run: Path) -> None:
    """The second attempt does not start from scratch either."""
    for name in (OLD, NEW):
        (run / "checkpoints" / name / MANIFEST).unlink()
    for place in (f"{OLD}/{MANIFEST}: missing", f"{NEW}.damaged-1: damaged"):
        with pytest.raises(RankFailed) as told:
            run_ranks(resume, 2, [str(run)], FSDP)
        assert f"no checkpoint can be used: {run / 'checkpoints' / place} (" in str(told.value)
        assert "to train from the start, start a new run" in str(told.value)
    assert names(run) == [f"{OLD}.damaged-1", f"{NEW}.damaged-1"]


def test_no_silent_start_where_all_checkpoints_are_gone(run: Path) -> None:
    """A disk that was not mounted looks like this."""
    kept = run / "checkpoints"
    kept.rename(run / "unmounted")
    with pytest.raises(RankFailed) as told:
        run_ranks(resume, 2, [str(run)], FSDP)
    assert f"this run saved checkpoints in {kept}, and now there are" in str(told.value)
    assert f"delete {run / 'checkpoints.at'}" in str(told.value)
    (run / "checkpoints.at").unlink()
    assert run_ranks(resume, 2, [str(run)], FSDP)[0]["step"] == 0


def test_ranks_that_write_to_different_places(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with pytest.raises(RankFailed) as told:
        run_ranks(resume, 2, [str(run), str(other)], FSDP)
    assert "rank 1 does not see what rank 0 writes to " in str(told.value)
    assert SAME_STORE in str(told.value)
    assert (names(run), names(other)) == ([OLD, NEW], [])


POINTS: dict[str, tuple[bool, int, Fault, int]] = {
    "uncommitted": (True, 0, Fault(root="", at=2, only="rename", how="before"), FIRST),
    "committed": (False, 0, Fault(root="", at=2, only="rename", how="after"), SECOND),
    "mid-file": (True, 1, Fault(root="", at=3, only="pwrite", how="half"), FIRST),
    "unsynced": (False, 1, Fault(root="", at=0, only="fsync", how="before"), FIRST),
    "full disk": (True, 1, Fault(root="", at=0, only="posix_fallocate", how="ENOSPC"), FIRST),
}
"""Whether saves are asynchronous, the rank, what its writer meets, and the step to resume from."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str], list[Any]]:
    """Return the folder of a run with each of POINTS, its error, and how each was resumed."""
    root, errors = tmp_path_factory.mktemp("killed"), {}
    for name, (asynchronous, rank, fault, _) in POINTS.items():
        fault = dataclasses.replace(fault, root=str(root / name / "checkpoints" / NEW))
        setting = Setting(wrap="fsdp full", checkpoint={"keep": None, "asynchronous": asynchronous})
        (root / name).mkdir()
        with pytest.raises(RankFailed) as told:
            run_ranks(save_twice, 2, str(root / name), setting, (rank, fault))
        errors[name] = str(told.value)
    folders = [str(root / name) for name in POINTS]
    return root, errors, run_ranks(resume_all, 2, folders, FSDP)


@pytest.mark.parametrize("name", POINTS)
def test_a_writer_that_ends_in_a_save(
    name: str, saved: Path, killed: tuple[Path, dict[str, str], list[Any]]
) -> None:
    root, errors, resumed = killed
    _, rank, _, step = POINTS[name]
    place = root / name / "checkpoints"
    for told in resumed:
        found = told[list(POINTS).index(name)]
        assert found["step"] == step
        assert found["state"] == state(saved, step)
        assert found["newest"] == str(place / f"step-{step + 1:08d}")
    assert names(root / name) == [f"step-{number:08d}" for number in range(FIRST, step + 2)]
    if name == "full disk":
        problem = f"No space left on device: {place / NEW}.tmp-"
        assert f"{NEW} could not be saved: {problem}" in errors[name]
        assert "rank-00001.safetensors (earlier checkpoints are unchanged)" in errors[name]
    else:
        ended = f"the process that writes rank {rank}'s checkpoints ended (SIGKILL)"
        assert ended in errors[name]


def restore_with_bad_memory(dist: DistContext, folder: str) -> str:
    if dist.rank == 1:
        read = local_store.LocalStore.read

        def flipped(
            self: Any, name: str, file: str, ranges: Iterable[tuple[int, memoryview]]
        ) -> int:
            wanted = list(ranges)
            count = read(self, name, file, wanted)
            for offset, into in wanted:
                if offset > 0:
                    into[0] ^= 1
            return count

        local_store.LocalStore.read = flipped  # type: ignore[method-assign]
    return restored(dist, folder)


def restore_from_own_disks(dist: DistContext, folder: str, others: list[str]) -> list[str]:
    """Restore where rank 1 reads the checkpoints of each other folder, under the same names."""
    return [restored(dist, folder, other) for other in others]


def restored(dist: DistContext, folder: str, other: str = "") -> str:
    """Return why ranks refuse to restore; the engine is unchanged then."""
    ctx = context(dist, folder)
    engine = make_engine(ctx, FSDP)
    checkpoints = checkpoint_stage(FSDP).run(ctx, engine)
    if dist.rank == 1 and other:
        checkpoints.store = local_store.LocalStore(Path(other, "checkpoints"))
    before = digest(engine, dist)
    try:
        checkpoints.restore(lambda progress: None)
    except StageError as error:
        assert not other or digest(engine, dist) == before
        return str(error)
    finally:
        checkpoints.close()
    return "restored"


def test_nodes_that_resume_from_different_checkpoints(run: Path, tmp_path: Path) -> None:
    """They have the same name and step, and each is whole, or one is damaged or missing."""
    setting = dataclasses.replace(FSDP, optimizer=dataclasses.replace(ADAMW, lr=2e-3))
    run_ranks(save_twice, 2, str(tmp_path / "another"), setting)
    for name in ("damaged", "missing"):
        shutil.copytree(run, tmp_path / name)
    (tmp_path / "damaged" / "checkpoints" / NEW / MANIFEST).write_bytes(b"{}")
    (tmp_path / "missing" / "checkpoints" / NEW / MANIFEST).unlink()
    others = [tmp_path / name for name in ("another", "damaged", "missing")]
    for rank in run_ranks(restore_from_own_disks, 2, str(run), [str(one) for one in others]):
        for said in rank:
            assert said.startswith("the ranks of this run do not have the same checkpoint ")
            assert f"{NEW}: manifest is " in said
    assert [names(place) for place in (run, *others)] == [[OLD, NEW]] * 4


def test_what_rank_0_cannot_read_now_is_not_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = local_store.LocalStore(tmp_path)
    assert write(Tiny(str(tmp_path)), 1).problem == ""
    engine: Any = None  # never called
    ctx = context(DistContext(device=torch.device("cpu")), tmp_path)

    def unreachable(*_: object) -> None:
        raise OSError(errno.ETIMEDOUT, "timed out")

    monkeypatch.setattr(local_store.LocalStore, "read", unreachable)
    with pytest.raises(CheckpointError, match="cannot be read: timed out"):
        Restoration(ctx, engine, store)._require_confirmed(
            "step-00000001", [None, ("damaged", "weight/a")]
        )


def test_a_rank_that_reads_wrong_bytes_condemns_its_machine_and_not_the_checkpoint(
    run: Path,
) -> None:
    for said in run_ranks(restore_with_bad_memory, 2, str(run)):
        assert said.startswith("rank 1 cannot read what rank 0 reads well: ")
        assert "damaged near byte" in said
    assert names(run) == [OLD, NEW]
