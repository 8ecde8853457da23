"""Checkpoints of one tensor that any mesh of ranks holds, written by the real writers in this
process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint.file_layout import FileLayout, Staging, plan_staging
from pipeline.checkpoint.retention import Retention
from pipeline.checkpoint.snapshot import Snapshot
from pipeline.checkpoint.write_plan import LocalShard, divide, report
from pipeline.checkpoint.writer import SaveRequest, Write, WriterSetup
from pipeline.checkpoint.writer_main import carry_out
from pipeline.contracts.engine import WEIGHT, Fragment
from tests.support.cuts import Cut
from tests.support.tiny_store import job

KEY = "weight/a"
NAME = "step-00000001"


def content(cut: Cut) -> Tensor:
    """Return the flattened tensor: numbers that differ from place to place."""
    return torch.arange(cut.numel, dtype=torch.int32) * 7 + 3


def fragments(cut: Cut, rank: int, flat: Tensor) -> Iterator[Fragment]:
    """Yield a rank's fragments, given the whole tensor."""
    for tile in cut.tiles(rank):
        own = flat.as_strided((tile.count, tile.run), (tile.stride, 1), tile.start).reshape(-1)
        yield Fragment(
            name="a", shape=cut.shape, start=tile.start, state={WEIGHT: own}, stride=tile.stride,
            count=tile.count,
        )  # fmt: skip


def write(root: Path, cut: Cut, form: FileLayout, *, passage: int | None = None) -> None:
    """Save as all ranks of the mesh do. With `passage`, all passes in rounds through a memory of so
    many bytes."""
    flat = content(cut)
    held = [
        [LocalShard(KEY, "I32", cut.shape, tile) for tile in cut.tiles(rank)]
        for rank in range(cut.ranks)
    ]
    shares = divide([report(own, []) for own in held], form, {})
    layouts = [
        form.lay_out(rank, shares.division.of_rank(rank), shares.tensors)
        for rank in range(cut.ranks)
    ]
    files = [file for layout in layouts for file in layout.described]
    template = shares.model_copy(update={"files": files})
    for rank in reversed(range(cut.ranks)):  # rank 0's writer waits for the others
        streamed = {KEY} if passage else frozenset[str]()
        staging = plan_staging(layouts[rank], streamed, passage or 0)
        setup = WriterSetup(
            store=str(root), rank=rank, world_size=cut.ranks, buffer_size=staging.size,
            files=layouts[rank].files, shared=layouts[rank].shared,
            rounds=staging.rounds, retention=Retention(),
            template=None if rank else template,
        )  # fmt: skip
        engine: Any = SimpleNamespace(
            fragments=lambda r=rank: fragments(cut, r, flat), random_stream=rank
        )
        dist: Any = SimpleNamespace(rank=rank, device=torch.device("cpu"))
        plan: Any = SimpleNamespace(template=template)
        snapshot = Snapshot(engine, dist, plan, staging)
        writer: Any = _Writer(snapshot, staging)
        snapshot.start(writer, job(1, "x"))
        outcome = carry_out(setup, job(1, "x"), memoryview(writer.memory), writer.writes)
        assert outcome.problem == ""
        snapshot.buffer.close()


class _Writer:
    """Keeps each round's bytes when it is told of it, as the real writer does on disk."""

    def __init__(self, snapshot: Snapshot, staging: Staging) -> None:
        self._snapshot = snapshot
        self._rounds = iter(staging.rounds)
        self.memory = bytearray()
        self.writes: list[Write] = []

    def begin(self, request: SaveRequest) -> None:
        del request
        self.go_on()

    def go_on(self) -> None:
        for write in next(self._rounds):
            self.writes.append(write._replace(start=len(self.memory)))
            self.memory += self._snapshot.buffer.memory[write.start : write.start + write.size]

    def wait_taken(self) -> None:
        return None
