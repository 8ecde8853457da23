"""A rank that reads wrong bytes from a good disk condemns its machine, not the checkpoint."""

from __future__ import annotations

import dataclasses
import errno
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint import store as local_store
from pipeline.checkpoint.manifest import MANIFEST
from pipeline.checkpoint.restore import Restoration
from pipeline.distributed.process_group import DistContext
from pipeline.errors import CheckpointError, StageError
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.state import ADAMW, Setting, checkpoint_stage, digest, make_engine, save_run
from tests.support.tiny_store import Tiny, write

ENGINE: Any = None
"""Never called."""


def restore_with_bad_memory(dist: DistContext, folder: str) -> str:
    if dist.rank == 1:
        read = local_store.LocalStore.read

        def flipped(
            self: local_store.LocalStore,
            name: str,
            file: str,
            ranges: Iterable[tuple[int, memoryview]],
        ) -> int:
            wanted = list(ranges)
            count = read(self, name, file, wanted)
            for offset, into in wanted:
                if offset > 0:
                    into[0] ^= 1
            return count

        local_store.LocalStore.read = flipped  # type: ignore[method-assign]
    ctx = context(dist, folder)
    setting = Setting(wrap="fsdp full")
    engine = make_engine(ctx, setting)
    checkpoints = checkpoint_stage(setting).run(ctx, engine)
    try:
        checkpoints.restore(lambda progress: None)
    except CheckpointError as error:
        return str(error)
    finally:
        checkpoints.close()
    return "restored"


def restore_with_disks_of_their_own(dist: DistContext, folder: str, other: str) -> str:
    """Restore where rank 1 reads the checkpoints of `other`, under the same names."""
    ctx = context(dist, folder)
    setting = Setting(wrap="ddp")
    engine = make_engine(ctx, setting)
    checkpoints = checkpoint_stage(setting).run(ctx, engine)
    if dist.rank == 1:
        checkpoints.store = local_store.LocalStore(Path(other, "checkpoints"))
    before = digest(engine, dist)
    try:
        checkpoints.restore(lambda progress: None)
    except StageError as error:
        assert digest(engine, dist) == before
        return str(error)
    finally:
        checkpoints.close()
    return "restored"


@pytest.mark.parametrize("other", ["another", "damaged", "missing"])
def test_nodes_that_resume_from_different_checkpoints(tmp_path: Path, other: str) -> None:
    """They have the same name and step, and each is whole."""
    run_ranks(save_run, 2, str(tmp_path / "run"), Setting(wrap="ddp"))
    if other == "another":
        optimizer = dataclasses.replace(ADAMW, lr=2e-3)
        run_ranks(save_run, 2, str(tmp_path / other), Setting(wrap="ddp", optimizer=optimizer))
    else:
        shutil.copytree(tmp_path / "run", tmp_path / other)
        manifest = tmp_path / other / "checkpoints" / "step-00000003" / MANIFEST
        manifest.write_bytes(b"{}") if other == "damaged" else manifest.unlink()
    places = str(tmp_path / "run"), str(tmp_path / other)
    for said in run_ranks(restore_with_disks_of_their_own, 2, *places):
        assert said.startswith("the ranks of this run do not have the same checkpoint ")
        assert "step-00000003: manifest is " in said
    for place in places:
        assert [path.name for path in Path(place, "checkpoints").iterdir()] == ["step-00000003"]


def test_what_rank_0_cannot_read_now_is_not_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = local_store.LocalStore(tmp_path)
    assert write(Tiny(str(tmp_path)), 1).problem == ""
    restoration = Restoration(
        context(DistContext(device=torch.device("cpu")), tmp_path), ENGINE, store
    )

    def unreachable(*_: object) -> None:
        raise OSError(errno.ETIMEDOUT, "timed out")

    monkeypatch.setattr(local_store.LocalStore, "read", unreachable)
    with pytest.raises(CheckpointError, match="cannot be read: timed out"):
        restoration._require_confirmed("step-00000001", [None, ("damaged", "weight/a")])


def test_nothing_is_put_aside_for_what_rank_0_reads_well(tmp_path: Path) -> None:
    run_ranks(save_run, 2, str(tmp_path), Setting(wrap="fsdp full"))
    for said in run_ranks(restore_with_bad_memory, 2, str(tmp_path)):
        assert said.startswith("rank 1 cannot read what rank 0 reads well: ")
        assert "damaged near byte" in said
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
