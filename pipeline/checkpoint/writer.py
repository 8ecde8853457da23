"""A rank's writer: a process that writes its part of each checkpoint while training continues, and
that process as the training process sees it. Imports no torch.

It is started with a message (`pipeline.utils.processes`): the WriterSetup as JSON, and the
descriptor of the snapshot buffer. Standard input is a line of JSON with a SaveRequest for each
checkpoint, whose first round is then in the buffer, and an empty line for each further round;
standard output is one line of JSON for each checkpoint, a SaveResult, and before it an empty line
for each round whose place in the buffer is wanted for another. The writer of rank 0 also waits for
the others' reports in the transaction, commits, and then purges what need not be kept.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from resource import RUSAGE_SELF, getrusage, struct_rusage
from typing import Any

from pydantic import BaseModel
from xxhash import xxh3_64_intdigest

from pipeline.checkpoint.division import Tile
from pipeline.checkpoint.file_layout import HALVES, RankFiles, Write, block_sums
from pipeline.checkpoint.location import Retention, Store, open_store, purge
from pipeline.checkpoint.manifest import SUMS, ManifestTemplate
from pipeline.checkpoint.store import Transaction
from pipeline.distributed.signals import ignore_signals, signals_blocked
from pipeline.errors import CheckpointError, WriterDied, in_words
from pipeline.utils.processes import received, start_child
from pipeline.utils.terminal import hide_environment, redact_output

NICENESS = 10
"""Training on the same processors keeps nine tenths of one while a writer is at work, and a writer
that nothing competes with is as fast as ever."""
FileBytes = tuple[int, Tile, int, memoryview, bool]
"""File, a place in it, number of the first byte in that place, bytes; whether they are of a
piece, and so have checksums."""
REPORT = "rank-{:05d}.report"
"""Name of a rank's report."""
LONGEST_PAUSE = 0.2
"""Seconds between two looks for the other ranks' reports."""


class WriterSetup(BaseModel):
    """Constants of one rank's writer."""

    store: str
    rank: int
    world_size: int
    buffer_size: int
    """Bytes of the snapshot buffer."""
    files: Sequence[tuple[str, int]]
    """Names and sizes."""
    shared: bool
    """Whether ranks write parts of the same files; rank 0 writes the header."""
    rounds: Sequence[Sequence[Write]]
    """File by file, each from its start to its end."""
    template: ManifestTemplate | None
    """Rank 0 only."""
    retention: Retention


class SaveRequest(BaseModel):
    """Order to write one checkpoint."""

    name: str
    identity: str
    began: float
    """Time of the monotonic clock at which the save began."""
    facts: Mapping[str, Any] = {}
    """Fields `step`, `progress` and `state` of the manifest, on rank 0 only."""


class SaveResult(BaseModel):
    """Answer of a writer to its rank, and report to the writer of rank 0, in the transaction."""

    name: str
    problem: str = ""
    digest: int = 0
    """Digest of the rank's checksums."""
    address: str = ""
    size: int = 0
    """Bytes of the whole checkpoint's data, on rank 0."""
    seconds: float = 0.0
    """From the beginning of the save until the checkpoint was on disk, on rank 0."""
    ended: float = 0.0
    """Seconds since 1970 at which that was so."""
    user_seconds: float = 0.0
    """Processor time of this writer for the save; on rank 0 of all ranks' writers."""
    system_seconds: float = 0.0
    warnings: Sequence[str] = ()


class WriterProcess:
    """A rank's writer, started once a run, which maps the snapshot buffer of this descriptor. Must
    be made by the main thread: it dies with the thread that made it."""

    def __init__(self, setup: WriterSetup, buffer: int) -> None:
        self._rank = setup.rank
        message = {"setup": setup.model_dump_json(), "buffer": buffer}
        with signals_blocked():  # it ignores ending signals, but not before Python has started
            self._process = start_child(
                "pipeline.checkpoint.writer", message, pass_fds=[buffer],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        assert isinstance(self._process.stdout, io.BufferedReader)
        self._output: io.RawIOBase = self._process.stdout.raw
        """Without a buffer: `poll` would overlook a line that was read together with another."""

    def announce(self, request: SaveRequest | None = None) -> None:
        """Announce that a round is in the buffer: with a request, the first one of a save. It must
        not change until it is taken. Raises CheckpointError when the writer is dead."""
        text = request.model_dump_json() if request is not None else ""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._dead() from None

    def wait(self) -> SaveResult | None:
        """Wait until one more round is in the files; the result, if that has failed, or if it was
        the last. Raises CheckpointError when the writer is dead."""
        line: bytes = self._output.readline()
        if not line:
            raise self._dead()
        return SaveResult.model_validate_json(line) if line.strip() else None

    def poll(self) -> SaveResult | None:
        """The result if it is there already. Raises CheckpointError when the writer is dead."""
        output = select.poll()  # select() refuses descriptors above 1023
        output.register(self._output, select.POLLIN | select.POLLHUP)
        return self.wait() if output.poll(0) else None

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # input that it did not read any more
                pipe.close()

    def _dead(self) -> CheckpointError:
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return WriterDied(
            f"the process that writes rank {self._rank}'s checkpoints ended ({how})",
            hint="its messages are above or in the rank's log",
        )


def main(argument: str) -> None:
    """Write until standard input ends."""
    message = received(argument, ends_with_parent=True)
    redact_output()
    hide_environment()
    os.nice(NICENESS)
    # terminals and schedulers send these to all processes of a run; the rank decides what they mean
    ignore_signals()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer  # UTF-8, whatever the locale
    setup = WriterSetup.model_validate_json(message["setup"])
    # populated now, or the first save has all the page faults
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    size = max(setup.buffer_size, 1)
    buffer = memoryview(mmap.mmap(message["buffer"], size, flags=flags, prot=mmap.PROT_READ))

    def writes() -> Iterator[Write]:
        """Wait for each round; acknowledge it once the next write is asked for."""
        for number, round_ in enumerate(setup.rounds):
            if number and not requests.readline():
                raise CheckpointError("the process that trains has ended")
            yield from round_
            if number + HALVES < len(setup.rounds):
                answers.write(b"\n")
                answers.flush()

    for line in requests:
        if not line.strip():  # a round of a save that has failed
            continue
        result = carry_out(setup, SaveRequest.model_validate_json(line), buffer, writes())
        answers.write(result.model_dump_json().encode() + b"\n")
        answers.flush()


def carry_out(
    setup: WriterSetup,
    request: SaveRequest,
    buffer: memoryview,
    writes: Iterable[Write] | None = None,
) -> SaveResult:
    """Write, report, and on rank 0 commit. Failures are in the result; nothing is raised. `writes`
    are all rounds', and yield when their bytes are in the buffer."""
    before = getrusage(RUSAGE_SELF)
    result = SaveResult(name=request.name)
    store = transaction = None
    is_reported = False
    try:
        store = open_store(setup.store)
        transaction = store.begin(request.name, request.identity)
        given = writes or itertools.chain(*setup.rounds)
        parts = (
            (
                w.file, w.place, w.place_offset,
                buffer[w.buffer_offset : w.buffer_offset + w.size], bool(w.key),
            )
            for w in given
        )  # fmt: skip
        digest = write_files(setup, parts, store, transaction, setup.rank)
        if setup.template is None:
            result.digest = digest
            is_reported = True  # rank 0 may see it, and commit the files, even if this raises
            _note_cost(result, before, ())
            _report(setup, store, transaction, result)
            return result
        others = _collect(store, transaction, setup.world_size)
        digests = [digest, *(other.digest for other in others)]
        manifest = setup.template.fill(request.facts, transaction.prefix, digests)
        store.commit(transaction, manifest.dump())
    except Exception as error:
        result.problem = in_words(error)
        if store is None or transaction is None:
            return result
        if setup.rank == 0:
            store.abandon(transaction)
            return result
        for name, _ in () if setup.shared or is_reported else setup.files:
            with contextlib.suppress(OSError):
                store.remove(*transaction.at(name))  # on a full disk, room for the report
        with contextlib.suppress(OSError):  # this rank also ends the run by itself
            _report(setup, store, transaction, result)  # to rank 0, whose disk may be another one
        return result
    result.address = store.locate(request.name)
    result.size = sum(file.size for file in setup.template.files)
    result.seconds, result.ended = time.monotonic() - request.began, time.time()
    result.warnings = purge(store, setup.retention)
    _note_cost(result, before, others)
    return result


def _report(setup: WriterSetup, store: Store, place: Transaction, result: SaveResult) -> None:
    """Report to rank 0; the line break at the end marks a report that is all there."""
    data = result.model_dump_json().encode() + b"\n"
    store.put(*place.at(REPORT.format(setup.rank)), data)


def _note_cost(result: SaveResult, before: struct_rusage, others: Sequence[SaveResult]) -> None:
    """Note the processor time of this process since `before`, and of the other ranks' writers."""
    now = getrusage(RUSAGE_SELF)
    result.user_seconds = now.ru_utime - before.ru_utime + sum(o.user_seconds for o in others)
    result.system_seconds = now.ru_stime - before.ru_stime + sum(o.system_seconds for o in others)


def _collect(store: Store, transaction: Transaction, world_size: int) -> list[SaveResult]:
    """The other ranks' reports, once all have written. Raises CheckpointError if one failed."""
    reports, files = [], [transaction.at(REPORT.format(rank)) for rank in range(1, world_size)]
    for rank, file in enumerate(files, 1):
        data, pause = b"", 0.001
        while True:
            with contextlib.suppress(FileNotFoundError):
                data = store.get(*file)
            if data.endswith(b"\n"):
                break
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        reports.append(SaveResult.model_validate_json(data))
        if reports[-1].problem:
            raise CheckpointError(f"rank {rank}: {reports[-1].problem}")
    for file in files:
        store.remove(*file)
    return reports


def write_files(
    own: WriterSetup | RankFiles,
    parts: Iterable[FileBytes],
    store: Store,
    transaction: Transaction,
    rank: int = 0,
) -> int:
    """Write a rank's files and their checksums; returns the digest of these."""
    sums: list[int] = []
    for number, group in itertools.groupby(parts, key=lambda part: part[0]):
        name, size = own.files[number]
        with store.create(*transaction.at(name), size, shared=own.shared) as put:
            for _, place, begin, data, is_piece in group:
                sums += block_sums(data) if is_piece else ()
                for offset, low, high in place.segments(begin, len(data)):
                    put(offset, data[low:high])
    # Little-endian, the byte order of tensors too, as it is the machine's wherever torch runs.
    packed = struct.pack(f"<{len(sums)}Q", *sums)
    store.put(*transaction.at(SUMS.format(rank)), packed)
    return xxh3_64_intdigest(packed)


if __name__ == "__main__":
    main(sys.argv[1])
