"""A rank that reads wrong bytes from a good disk condemns its machine, not the checkpoint."""

from __future__ import annotations

from pathlib import Path

from pipeline.dist import Dist
from pipeline.errors import CheckpointError
from pipeline.state import local_store
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.state import Setting, checkpoint_stage, make_engine, save_run


def restore_with_bad_memory(dist: Dist, folder: str) -> str:
    if dist.rank == 1:
        read = local_store._LocalSource.read

        def flipped(self: local_store._LocalSource, offset: int, into: memoryview) -> int:
            count = read(self, offset, into)
            if offset > 0:
                into[0] ^= 1
            return count

        local_store._LocalSource.read = flipped  # type: ignore[method-assign]
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


def test_nothing_is_put_aside_for_what_rank_0_reads_well(tmp_path: Path) -> None:
    run_ranks(save_run, 2, str(tmp_path), Setting(wrap="fsdp full"))
    for said in run_ranks(restore_with_bad_memory, 2, str(tmp_path)):
        assert said.startswith("rank 1 cannot read what rank 0 reads well: ")
        assert "damaged near byte" in said
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
