"""Write a whole checkpoint in one process, as a stream from a state of any format. Imports no
torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from pipeline.checkpoint.division import Division, Piece
from pipeline.checkpoint.file_format import CHUNK
from pipeline.checkpoint.file_layout import FileLayout, RankFiles
from pipeline.checkpoint.formats import StateSource
from pipeline.checkpoint.manifest import ManifestTemplate
from pipeline.checkpoint.store import Store, step_name, step_number
from pipeline.checkpoint.writer_main import FileBytes, write_files
from pipeline.errors import UsageError
from pipeline.utils.files import page_aligned, sync, sync_tree


def step_target(folder: Path, step: int) -> Path:
    """A folder `step-N` itself, any other with `step-N` in it. Raises UsageError for another N."""
    number = step_number(folder.name)
    if number is None:
        return folder / step_name(step)
    if number != step:
        raise UsageError(
            f"{folder}: the state is of step {step}",
            hint=f"call the folder {step_name(step)}, or give the folder to put that in",
        )
    return folder


def write_checkpoint(source: StateSource, store: Store, name: str, file_layout: FileLayout) -> None:
    """Commit `source` as the checkpoint `name`, with checksums, in memory for one chunk. Raises
    OSError, and whatever reading `source` raises."""
    entries = file_layout.in_order(entry for entry in source.tensors.values() if entry.numel)
    division = Division.of([Piece(0, 0, entry.numel)] for entry in entries)
    own = file_layout.lay_out(0, division.of_rank(0), entries)
    template = ManifestTemplate(
        world_size=source.world_size, writer=source.writer, tensors=entries, division=division,
        files=own.described,
    )  # fmt: skip
    facts = {"step": source.step, "progress": source.progress, "state": source.state}
    transaction = store.begin(name, uuid.uuid4().hex[:12])
    try:
        digest = write_files(own, _stream(source, own), transaction)
        store.commit(transaction, template.fill(facts, transaction.prefix, [digest]).dump())
    except BaseException:
        store.abandon(transaction)
        raise


def _stream(source: StateSource, own: RankFiles) -> Iterator[FileBytes]:
    """All bytes of the files, each part valid until the next is taken."""
    for item in own.items:
        if not item.key:
            yield item.file, item.place, 0, memoryview(item.head), False
            continue
        size, buffer = item.place.numel, page_aligned(min(CHUNK, item.place.numel))
        for begin in range(0, size, CHUNK):  # whole blocks, but for the last
            data = buffer[: size - begin]
            source.read_into(item.key, begin // source.entry(item.key).itemsize, data)
            yield item.file, item.place, begin, data, True


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder to write into. It appears as `folder` when the body ends, durably, or not at all."""
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_tree(partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(folder.parent)
