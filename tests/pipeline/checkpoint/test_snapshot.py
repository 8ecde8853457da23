"""Copies of a rank's state for the writer, and the memory that they are made in."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.checkpoint.division import Tile
from pipeline.checkpoint.file_layout import SHARDED, plan_staging
from pipeline.checkpoint.manifest import TensorEntry
from pipeline.checkpoint.snapshot import (
    ALLOCATED_AT_ONCE,
    Snapshot,
    SnapshotBuffer,
    memory_need,
)
from pipeline.contracts.engine import Fragment
from pipeline.errors import CheckpointError
from tests.support.tiny_store import job


def test_the_memory_is_taken_before_a_save_needs_it() -> None:
    size = 3 * ALLOCATED_AT_ONCE // 2
    buffer = SnapshotBuffer(size)
    assert os.fstat(buffer.descriptor).st_blocks == 0
    buffer.allocate(torch.device("cpu"))
    assert os.fstat(buffer.descriptor).st_blocks * 512 >= size
    buffer.close()


def test_taking_memory_ends_when_it_is_not_wanted_any_more() -> None:
    buffer = SnapshotBuffer(ALLOCATED_AT_ONCE)
    buffer.closing = True
    buffer.allocate(torch.device("cpu"))
    assert os.fstat(buffer.descriptor).st_blocks == 0
    buffer.close()


def test_memory_that_cannot_be_taken_ends_training_before_a_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    snapshot, writer = lost_tensor({}), None
    wait([snapshot.filled])
    with pytest.raises(CheckpointError, match="cannot be taken: Cannot allocate memory"):
        snapshot.filled.result()
    with pytest.raises(CheckpointError, match="cannot be taken: Cannot allocate memory"):
        snapshot.start(writer, job(1, "x"))  # type: ignore[arg-type]
    snapshot.close()


def test_memory_that_is_still_to_be_allocated_is_known() -> None:
    dist: Any = SimpleNamespace(local_world_size=2)

    def needed() -> int:
        return memory_need(dist).memory // 2

    before = needed()
    buffer = SnapshotBuffer(ALLOCATED_AT_ONCE + 5)
    assert needed() == before + ALLOCATED_AT_ONCE + 5
    buffer.allocate(torch.device("cpu"))
    assert needed() == before
    other = SnapshotBuffer(7)
    assert needed() == before + 7
    other.close()
    assert needed() == before
    buffer.close()


def lost_tensor(moments: dict[str, int]) -> Snapshot:
    """Return a snapshot for a plan that names a moment, of an engine with `moments` by numel."""
    entry = TensorEntry(key="exp_avg/a", dtype="F32", shape=(9,))
    layout = SHARDED.lay_out(0, [(0, Tile(0, 9))], [entry])
    state = {kind: torch.zeros(numel) for kind, numel in ({"weight": 9} | moments).items()}
    fragment = Fragment(name="a", shape=(9,), start=0, state=state)
    engine: Any = SimpleNamespace(fragments=lambda: [fragment], random_stream=0)
    plan: Any = SimpleNamespace(template=SimpleNamespace(tensors=[entry]))
    dist: Any = SimpleNamespace(rank=0, device=torch.device("cpu"))
    return Snapshot(engine, dist, plan, plan_staging(layout, frozenset()))


@pytest.mark.parametrize(
    ("moments", "problem"),
    [({}, "exp_avg/a no longer exists"), ({"exp_avg": 7}, "exp_avg/a changed its size")],
)
def test_a_lost_tensor_is_not_saved_with_the_bytes_of_an_earlier_save(
    moments: dict[str, int], problem: str
) -> None:
    snapshot = lost_tensor(moments)
    writer: Any = None
    with pytest.raises(AssertionError, match=problem):
        snapshot.start(writer, job(1, "x"))
    snapshot.close()


def test_what_does_not_last_is_kept_before_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model may change its buffers in forward; parameters stay until the update."""
    names, go_on, copy = ("a", "b"), threading.Event(), Snapshot._copy
    keys = [f"weight/{name}" for name in names]
    entries = [TensorEntry(key=key, dtype="F32", shape=(9,)) for key in keys]
    layout = SHARDED.lay_out(0, [(0, Tile(0, 9)), (1, Tile(0, 9))], entries)
    tensors = {name: torch.zeros(9) for name in names}
    fragments = [
        Fragment(name=name, shape=(9,), start=0, state={"weight": tensors[name]}) for name in names
    ]
    engine: Any = SimpleNamespace(fragments=lambda: fragments, random_stream=0)
    plan: Any = SimpleNamespace(template=SimpleNamespace(tensors=entries))
    dist: Any = SimpleNamespace(rank=0, device=torch.device("cpu"))
    snapshot = Snapshot(engine, dist, plan, plan_staging(layout, frozenset(keys)))

    def late(own: Snapshot, *piece: Any) -> None:
        assert go_on.wait(60)
        copy(own, *piece)

    monkeypatch.setattr(Snapshot, "_copy", late)
    writer: Any = SimpleNamespace(announce=lambda request: None)
    snapshot.start(writer, job(1, "x"), {"a"})
    for tensor in tensors.values():
        tensor.fill_(1.0)
    assert not snapshot.copied.done()
    go_on.set()
    assert snapshot.copied.result() is None
    places = {write.key: write.buffer_offset for own in snapshot.staging.rounds for write in own}
    memory = snapshot.buffer.memory
    found = [bytes(memory[places[key] : places[key] + 36]) for key in keys]
    assert found == [torch.ones(9).numpy().tobytes(), bytes(36)]
    snapshot.close()
