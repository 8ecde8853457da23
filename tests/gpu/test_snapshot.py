"""Checkpoints of a state on a GPU, which goes on changing while they are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.checkpoint.location import open_checkpoint
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.snapshot import SnapshotBuffer
from pipeline.checkpoint.write_plan import DTYPES
from pipeline.contracts.engine import Engine
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from stages.checkpoint.sharded import ShardedCheckpoint
from tests.gpu.training import LLAMA, Case, engine_of, made_steps, started, train

LARGE = {**LLAMA, "vocab_size": 1 << 16, "hidden_size": 128}
"""About 100 MB with moments: writing takes longer than a step."""


def copies(engine: Engine) -> dict[str, Tensor]:
    """Return the state in host memory."""
    return {
        f"{kind}/{fragment.name}": values.detach().cpu().clone()
        for fragment in engine.fragments()
        for kind, values in fragment.state.items()
    }


def overwrite(engine: Engine) -> None:
    """Fill all weights and moments with something else, as soon as they may change."""
    assert engine.lasting_fragments
    engine.announce_change()
    with torch.no_grad():
        for fragment in engine.fragments():
            for values in fragment.state.values():
                values.fill_(float("nan"))


def assert_holds(folder: Path, expected: dict[str, Tensor]) -> None:
    """Compare every tensor of a checkpoint."""
    reader = CheckpointReader(*open_checkpoint(str(folder)))
    assert set(expected) == {key for key in reader.tensors if not key.startswith("random/")}
    for key, values in expected.items():
        dtype = DTYPES[reader.entry(key).dtype]
        found = torch.frombuffer(bytearray(reader.read_bytes(key)), dtype=dtype)
        assert torch.equal(found, values), key
    reader.close()


def assert_snapshots(dist: DistContext, folder: Path, case: Case, *, asynchronous: bool) -> None:
    """Save twice, change the state at once each time, and read both."""
    steps = made_steps(dist.device, steps=3)
    ctx = started(dist, folder)
    engine = engine_of(ctx, case)
    checkpoints = ShardedCheckpoint(asynchronous=asynchronous).run(ctx, engine)
    train(engine, steps[:1])
    first = copies(engine)
    checkpoints.save(Progress(step=1))
    train(engine, steps[1:2], first=1)
    second = copies(engine)
    assert not torch.equal(first["weight/model.norm.weight"], second["weight/model.norm.weight"])
    checkpoints.save(Progress(step=2))
    overwrite(engine)
    newest = Path(checkpoints.finish())
    checkpoints.close()
    engine.close()
    older, *_ = sorted(newest.parent.glob("step-*"))
    assert older != newest
    assert_holds(older, first)
    assert_holds(newest, second)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("wrap", ["wrap.ddp", "wrap.fsdp"])
def test_snapshot(wrap: str, asynchronous: bool, gpu: DistContext, tmp_path: Path) -> None:
    case = Case(wrap=wrap, model=LARGE)
    assert_snapshots(gpu, tmp_path, case, asynchronous=asynchronous)


def test_pages_of_the_buffer_are_locked(gpu: DistContext) -> None:
    buffer = SnapshotBuffer(1 << 24)
    assert not torch.frombuffer(buffer.memory, dtype=torch.uint8).is_pinned()
    buffer.allocate(gpu.device)
    assert torch.frombuffer(buffer.memory, dtype=torch.uint8).is_pinned()
    values = torch.arange(1 << 22, device=gpu.device, dtype=torch.int32)
    torch.frombuffer(buffer.memory, dtype=torch.int32).copy_(values, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(torch.frombuffer(buffer.memory, dtype=torch.int32), values.cpu())
    again = SnapshotBuffer(1 << 24)
    again.address = buffer.address
    again.allocate(gpu.device)  # refused: they are locked
    assert buffer.locked
    assert not again.locked
    assert float(torch.ones(3, device=gpu.device).sum()) == 3.0
    again.close()
    buffer.close()
