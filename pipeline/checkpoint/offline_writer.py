"""Write checkpoints in one process and as a stream, from a state of any format.

Memory does not grow with the state: only one chunk is held at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from pipeline.checkpoint.block_sums import CHUNK, sums
from pipeline.checkpoint.division import KeyedTile, Run
from pipeline.checkpoint.file_layout import FileLayout, Layout
from pipeline.checkpoint.formats import StateSource
from pipeline.checkpoint.manifest import ManifestTemplate
from pipeline.checkpoint.store import Store, Transaction, step_name, step_number
from pipeline.checkpoint.writer_main import put_sums
from pipeline.errors import UsageError
from pipeline.utils.files import page_aligned, sync, sync_tree


def step_target(folder: Path, step: int) -> Path:
    """A folder called `step-N` itself, any other with `step-N` in it. Raises UsageError when the
    folder is called after another step."""
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
    """Commit `source` as the checkpoint `name`, with checksums. Raises OSError, and whatever
    reading `source` raises."""
    entries = file_layout.in_order(entry for entry in source.tensors.values() if entry.numel)
    spans = [KeyedTile(entry.key, 0, entry.numel) for entry in entries]
    layout = file_layout.lay_out(0, spans, {entry.key: entry for entry in entries})
    template = ManifestTemplate(
        world_size=source.world_size,
        writer=source.writer,
        tensors=entries,
        runs=[[Run(0, entry.numel, entry.numel, 0)] for entry in entries],
        files=layout.described,
    )
    facts = {"step": source.step, "progress": source.progress, "state": source.state}
    transaction = store.begin(name, uuid.uuid4().hex[:12])
    try:
        digest = put_sums(transaction, 0, list(_write(source, layout, transaction)))
        store.commit(transaction, template.fill(facts, transaction.prefix, [digest]).dump())
    except BaseException:
        store.abandon(transaction)
        raise


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


def _write(source: StateSource, layout: Layout, transaction: Transaction) -> Iterator[int]:
    """Write the files; yields the block checksums of all pieces."""
    for number, items in itertools.groupby(layout.items, key=lambda item: item.file):
        file = layout.files[number]
        with transaction.create(file.name, file.size, shared=file.shared) as sink:
            for item in items:
                if item.span is None:
                    sink.write(0, memoryview(item.head))
                else:
                    # all chunks but the last are whole blocks
                    begin = 0
                    for data in _chunks(source, item.span):
                        yield from sums(data)
                        for offset, low, high in item.extent.segments(begin, len(data)):
                            sink.write(offset, data[low:high])
                        begin += len(data)


def _chunks(source: StateSource, span: KeyedTile) -> Iterator[memoryview]:
    """All bytes of a span in whole blocks, each valid until the next is taken."""
    itemsize = source.entry(span.key).itemsize
    buffer = page_aligned(min(CHUNK, (span.stop - span.start) * itemsize))
    for start in range(span.start, span.stop, CHUNK // itemsize):
        chunk = buffer[: (span.stop - start) * itemsize]
        source.read_into(span.key, start, chunk)
        yield chunk
