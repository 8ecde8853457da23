"""A checkpoint of a few tensors that two writers make together, without torch and without training.

A checkpoint's content is a function of its step, so a reader can decide whether it is exact.
"""

from __future__ import annotations

import hashlib
import random
import threading

from pipeline.checkpoint.division import Run
from pipeline.checkpoint.manifest import ManifestTemplate, TensorEntry
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.retention import Retention
from pipeline.checkpoint.staging import Staging, plan_staging
from pipeline.checkpoint.store import Store, step_name
from pipeline.checkpoint.writer_main import carry_out
from pipeline.checkpoint.writer_protocol import SaveRequest, SaveResult, WriterSetup

TENSORS = [
    TensorEntry(key="weight/a", dtype="F32", shape=(3, 50)),
    TensorEntry(key="weight/b", dtype="F32", shape=(90, 100)),
    TensorEntry(key="exp_avg/b", dtype="BF16", shape=(90, 100)),
    TensorEntry(key="random/00000/torch", dtype="U8", shape=(77,)),
    TensorEntry(key="random/00001/torch", dtype="U8", shape=(77,)),
]
"""`b` is longer than a block of checksums."""

RUNS = [
    [Run(0, 150, 150, 0)],
    [Run(0, 4501, 4501, 0), Run(4501, 9000, 4499, 1)],
    [Run(0, 200, 200, 0), Run(200, 9000, 8800, 1)],
    [Run(0, 77, 77, 0)],
    [Run(0, 77, 77, 1)],
]
COLUMNS = [
    RUNS[0],
    [Run(0, 9000, 9000, 0, 0, 1, 0, 100, 2, 1)],
    [
        Run(0, 3930, 4000, 0, width=100), Run(30, 4000, 4000, 1, width=100),
        Run(4000, 9000, 5000, 1),
    ],
    *RUNS[3:],
]  # fmt: skip
"""The same tensors, `b` divided by columns: evenly, and as no rule would."""
ARRANGEMENTS = ("sharded", "full", "sharded columns", "full columns")


def division(arrangement: str) -> list[list[Run]]:
    """Return the runs of each of TENSORS."""
    return COLUMNS if arrangement.endswith("columns") else RUNS


def setups(
    address: str, arrangement: str = "sharded", retention: Retention | None = None
) -> tuple[list[WriterSetup], list[Staging]]:
    """Return for each rank its WriterSetup and the content of its arena."""
    from pipeline.checkpoint.file_layout import FULL, SHARDED
    from pipeline.checkpoint.write_plan import spans_of

    made = SHARDED if arrangement.startswith("sharded") else FULL
    runs = {t.key: own for t, own in zip(TENSORS, division(arrangement), strict=True)}
    ordered = made.in_order(TENSORS)
    own = [runs[tensor.key] for tensor in ordered]
    tensors = {tensor.key: tensor for tensor in ordered}
    layouts = [made.lay_out(rank, spans_of(rank, ordered, own), tensors) for rank in range(2)]
    stagings = [plan_staging(layout, frozenset()) for layout in layouts]
    files = [file for layout in layouts for file in layout.described]
    template = ManifestTemplate(
        world_size=2, writer={"engine": {"strategy": "tiny"}, "packages": {"torch": "2.0"}},
        tensors=ordered, runs=own, files=files,
    )  # fmt: skip
    return [
        WriterSetup(
            store=address, rank=rank, world_size=2, buffer_size=staging.size, files=layout.files,
            rounds=staging.rounds, template=None if rank else template,
            retention=retention or Retention(),
        )
        for rank, (layout, staging) in enumerate(zip(layouts, stagings, strict=True))
    ], stagings  # fmt: skip


class Tiny:
    """Two writers' setups, and their data at each step. Pickles; needs no torch once made."""

    def __init__(
        self, address: str, arrangement: str = "sharded", retention: Retention | None = None
    ) -> None:
        self.setups, self._stagings = setups(address, arrangement, retention)
        self._tiles = [
            {(t.key, tile[0]): tile for t, own in zip(TENSORS, division(arrangement), strict=True)
             for run in own if (tile := run.of(rank))}
            for rank in range(2)
        ]  # fmt: skip

    def arena(self, rank: int, step: int) -> memoryview:
        """Return the memory that `rank` writes at `step`."""
        memory = bytearray(self.setups[rank].buffer_size)
        for place, head in self._stagings[rank].heads:
            memory[place : place + len(head)] = head
        sizes = {tensor.key: tensor.itemsize for tensor in TENSORS}
        for key, start, numel, place, _ in self._stagings[rank].whole:
            tile, size, whole = self._tiles[rank][key, start], sizes[key], content(key, step)
            assert numel == tile.numel
            runs = range(start, tile.end, tile.stride or tile.run)
            part = b"".join(whole[low * size : (low + tile.run) * size] for low in runs)
            memory[place : place + len(part)] = part
        return memoryview(memory).toreadonly()


def content(key: str, step: int) -> bytes:
    """Return the bytes of a tensor at a step."""
    tensor = next(tensor for tensor in TENSORS if tensor.key == key)
    return random.Random(f"{key}@{step}").randbytes(tensor.numel * tensor.itemsize)


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
    return {t.key: hashlib.sha256(content(t.key, step)).hexdigest() for t in TENSORS}


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
