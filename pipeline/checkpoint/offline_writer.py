"""Write checkpoints in one process and as a stream, from a state of any format.

Memory does not grow with the state: what passes through is one chunk.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from xxhash import xxh3_64_intdigest

from pipeline.checkpoint import safetensors_format
from pipeline.checkpoint.division import Run, Span
from pipeline.checkpoint.layout import FileLayout, Layout
from pipeline.checkpoint.manager import sums_name
from pipeline.checkpoint.manifest import Manifest, Part, TensorEntry
from pipeline.checkpoint.state_source import StateSource
from pipeline.checkpoint.store import Sink, Store, Transaction, step_name, step_number
from pipeline.errors import CheckpointError, UsageError
from pipeline.utils.files import sync, sync_tree


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


def write_checkpoint(source: StateSource, store: Store, name: str, arrangement: FileLayout) -> None:
    """Commit `source` as the checkpoint `name`, with checksums. Raises CheckpointError."""
    entries = arrangement.in_order(entry for entry in source.tensors.values() if entry.numel)
    tensors = {entry.key: entry for entry in entries}
    spans = [Span(entry.key, 0, entry.numel) for entry in entries]
    layout = arrangement.lay_out(0, spans, tensors)
    attempt = store.attempt(name, uuid.uuid4().hex[:12])
    try:
        sums = safetensors_format.pack(list(_write(source, layout, attempt)))
        attempt.put(sums_name(0), sums)
        attempt.commit(_manifest(source, tensors, layout, attempt.prefix, sums).dump())
    except BaseException:
        attempt.abandon()
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


def _write(source: StateSource, layout: Layout, attempt: Transaction) -> Iterator[int]:
    """Write the files; yields the block checksums of all pieces."""
    for number, pieces in itertools.groupby(layout.pieces, key=lambda piece: piece[1]):
        file = layout.files[number]
        with attempt.create(file.name, file.size, shared=file.shared) as sink:
            sink.write(0, memoryview(layout.heads[number]))
            for span, _, offset in pieces:
                yield from _copy(source, span, offset, sink)


def _copy(source: StateSource, span: Span, offset: int, sink: Sink) -> Iterator[int]:
    done = 0
    parts = (data for _, data in source.read(span.key, span.start, span.stop))
    for chunk in regrouped(parts, safetensors_format.CHUNK):
        yield from safetensors_format.sums(chunk)
        sink.write(offset + done, chunk)
        done += len(chunk)
    size = source.entry(span.key).itemsize * (span.stop - span.start)
    if done != size:
        raise CheckpointError(f"{source.where}: {span.key} has {done} bytes instead of {size}")


def regrouped(parts: Iterable[memoryview], size: int) -> Iterator[memoryview]:
    """The same bytes in pieces of `size` (the last may be shorter), each valid until the next."""
    buffer = memoryview(bytearray(size))
    filled = 0
    for part in parts:
        while part:
            count = min(len(part), size - filled)
            buffer[filled : filled + count] = part[:count]
            filled, part = filled + count, part[count:]
            if filled == size:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def _manifest(
    source: StateSource, tensors: dict[str, TensorEntry], layout: Layout, prefix: str, sums: bytes
) -> Manifest:
    files = [file.model_copy(update={"name": prefix + file.name}) for file in layout.described]
    part = Part(sums=prefix + sums_name(0), digest=xxh3_64_intdigest(sums))
    return Manifest(
        step=source.step,
        world_size=source.world_size,
        written=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        writer=source.writer,
        progress=source.progress,
        state=source.state,
        tensors=list(tensors.values()),
        runs=[[Run(0, entry.numel, entry.numel, 0)] for entry in tensors.values()],
        files=files,
        parts=[part],
    )
