"""A checkpoint of a few tensors that two writers make together, without torch and without training.

A checkpoint's content is a function of its step, so a reader can decide whether it is exact.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Sequence
from typing import Any

from pipeline.checkpoint.division import Division, Piece
from pipeline.checkpoint.file_layout import Staging, plan_staging
from pipeline.checkpoint.location import Retention, Store
from pipeline.checkpoint.manifest import ManifestTemplate, TensorEntry
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.store import step_name
from pipeline.checkpoint.writer import SaveRequest, SaveResult, WriterSetup, carry_out

TENSORS = [
    TensorEntry(key="weight/a", dtype="F32", shape=(3, 50)),
    TensorEntry(key="weight/b", dtype="F32", shape=(90, 100)),
    TensorEntry(key="exp_avg/b", dtype="BF16", shape=(90, 100)),
    TensorEntry(key="random/00000/torch", dtype="U8", shape=(77,)),
    TensorEntry(key="random/00001/torch", dtype="U8", shape=(77,)),
]
"""`b` is longer than a block of checksums."""

PIECES = [
    [Piece(0, 0, 150)],
    [Piece(0, 0, 4501), Piece(1, 4501, 9000)],
    [Piece(0, 0, 200), Piece(1, 200, 9000)],
    [Piece(0, 0, 77)],
    [Piece(1, 0, 77)],
]
COLUMNS = [
    PIECES[0],
    [Piece(0, 0, 50, 100, 90), Piece(1, 50, 100, 100, 90)],
    [Piece(0, 0, 30, 100, 40), Piece(1, 30, 100, 100, 40), Piece(1, 4000, 9000)],
    *PIECES[3:],
]
"""The same tensors, `b` divided by columns: evenly, and as no strategy would."""
ARRANGEMENTS = ("sharded", "full", "sharded columns", "full columns")


def setups(
    address: str,
    arrangement: str = "sharded",
    retention: Retention | None = None,
    tensors: Sequence[TensorEntry] = TENSORS,
    pieces: Sequence[Sequence[Piece]] | None = None,
) -> tuple[list[WriterSetup], list[Staging]]:
    """Return for each rank its WriterSetup and the content of its arena."""
    from pipeline.checkpoint.file_layout import FULL, SHARDED

    made = SHARDED if arrangement.startswith("sharded") else FULL
    pieces = pieces or (COLUMNS if arrangement.endswith("columns") else PIECES)
    own = {tensor.key: each for tensor, each in zip(tensors, pieces, strict=True)}
    ordered = made.in_order(tensors)
    division = Division.of(own[tensor.key] for tensor in ordered)
    layouts = [made.lay_out(rank, division.of_rank(rank), ordered) for rank in range(2)]
    stagings = [plan_staging(layout, frozenset()) for layout in layouts]
    template = ManifestTemplate(
        world_size=2, writer={"engine": {"strategy": "tiny"}, "packages": {"torch": "2.0"}},
        tensors=ordered, division=division,
        files=[file for layout in layouts for file in layout.described],
    )  # fmt: skip
    return [
        WriterSetup(
            store=address, rank=rank, world_size=2, buffer_size=staging.size, files=layout.files,
            shared=layout.shared, rounds=staging.rounds, template=None if rank else template,
            retention=retention or Retention(),
        )
        for rank, (layout, staging) in enumerate(zip(layouts, stagings, strict=True))
    ], stagings  # fmt: skip


class Tiny:
    """Two writers' setups, and their data at each step. Pickles; needs no torch once made."""

    def __init__(
        self,
        address: str,
        arrangement: str = "sharded",
        retention: Retention | None = None,
        **content: Any,
    ) -> None:
        self.setups, self._stagings = setups(address, arrangement, retention, **content)

    def arena(self, rank: int, step: int) -> memoryview:
        memory = bytearray(self.setups[rank].buffer_size)
        for place, head in self._stagings[rank].heads:
            memory[place : place + len(head)] = head
        template = self.setups[0].template
        assert template is not None
        writes = {(w.key, w.first_element): w for w in self._stagings[rank].rounds[0] if w.key}
        for number, tile in template.division.of_rank(rank):
            tensor = template.tensors[number]
            size, whole, write = (
                tensor.itemsize,
                content_of(tensor, step),
                writes[tensor.key, tile.start],
            )
            assert write.size == tile.numel * size
            runs = range(tile.start, tile.end, tile.stride or tile.run)
            part = b"".join(whole[low * size : (low + tile.run) * size] for low in runs)
            memory[write.buffer_offset : write.buffer_offset + write.size] = part
        return memoryview(memory).toreadonly()


def content_of(tensor: TensorEntry, step: int) -> bytes:
    return random.Random(f"{tensor.key}@{step}").randbytes(tensor.nbytes)


def job(step: int, identity: str, *, loss: float | None = None) -> SaveRequest:
    """Return rank 0's order at a step; the other rank ignores the facts."""
    state = {
        "aliases": {"head": "a"},
        "frozen": [],
        "groups": [{"settings": {"lr": 0.1, "betas": [0.9, 0.99]}, "parameters": ["a", "b"]}],
        "updates": {"a": step, "b": step},
        "moments": ["exp_avg"],
        "loss_scale": {"scale": 1024.0, "good_steps": step},
    }
    facts = {
        "step": step,
        "progress": {"step": step, "metrics": {} if loss is None else {"eval_loss": loss}},
        "state": state,
    }
    return SaveRequest(name=step_name(step), identity=identity, began=0.0, facts=facts)


def digests(step: int) -> dict[str, str]:
    """Return the expected digest of every tensor at a step."""
    return {t.key: hashlib.sha256(content_of(t, step)).hexdigest() for t in TENSORS}


def read_digests(store: Store, name: str) -> dict[str, str]:
    """Return the digest of every tensor, read whole and verified. Raises the reader's errors."""
    reader = CheckpointReader(store, name)
    try:
        reader.verify()
        return {key: hashlib.sha256(reader.read_bytes(key)).hexdigest() for key in reader.tensors}
    finally:
        reader.close()


def write(tiny: Tiny, step: int, *, identity: str = "", loss: float | None = None) -> SaveResult:
    """Save in this process; return rank 0's outcome."""
    work = job(step, identity or f"attempt{step}", loss=loss)
    other = threading.Thread(target=carry_out, args=(tiny.setups[1], work, tiny.arena(1, step)))
    other.start()
    outcome = carry_out(tiny.setups[0], work, tiny.arena(0, step))
    other.join()
    return outcome
