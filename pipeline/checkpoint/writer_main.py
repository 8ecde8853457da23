"""The process that writes one rank's part of every checkpoint, while training goes on.

`python -m pipeline.checkpoint.writer_main SETUP BUFFER PARENT`: descriptors of a file that holds
the WriterSetup as JSON and of the snapshot buffer, and the rank's process. Standard input is a line
of JSON with a SaveRequest for each checkpoint, whose first round is then in the buffer, and an
empty line for each further round; standard output is one line of JSON for each checkpoint, a
SaveResult, and before it an empty line for each round whose place in the buffer is wanted for
another. The writer of rank 0 also waits for the others' reports in the transaction, commits, and
then purges what need not be kept.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from resource import RUSAGE_SELF, getrusage, struct_rusage

from xxhash import xxh3_64_intdigest

from pipeline.checkpoint import block_sums
from pipeline.checkpoint.manifest import sums_name
from pipeline.checkpoint.retention import purge
from pipeline.checkpoint.store import Store, Transaction, open_store
from pipeline.checkpoint.writer_protocol import SaveRequest, SaveResult, Write, WriterSetup
from pipeline.distributed.signals import ignore_signals
from pipeline.errors import CheckpointError, in_words
from pipeline.utils.files import read_all
from pipeline.utils.processes import die_with
from pipeline.utils.terminal import guard, hide_environment

NICENESS = 10
"""Training on the same processors keeps nine tenths of one while a writer is at work, and a writer
that nothing competes with is as fast as ever."""
LONGEST_PAUSE = 0.2
"""Seconds between two looks for the other ranks' reports."""


def main(argv: Sequence[str]) -> None:
    """Write until standard input ends."""
    die_with(int(argv[2]))
    guard()
    hide_environment()
    os.nice(NICENESS)
    # terminals and schedulers send these to all processes of a run; the rank decides what they mean
    ignore_signals()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer  # UTF-8, whatever the locale
    setup = WriterSetup.model_validate_json(read_all(int(argv[0])))
    # populated now, or the first save has all the page faults
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    size = max(setup.buffer_size, 1)
    buffer = memoryview(mmap.mmap(int(argv[1]), size, flags=flags, prot=mmap.PROT_READ))

    def writes() -> Iterator[Write]:
        """Wait for each round; acknowledge it once the next write is asked for."""
        for number, round_ in enumerate(setup.rounds):
            if number and not requests.readline():
                raise CheckpointError("the process that trains has ended")
            yield from round_
            if number + 2 < len(setup.rounds):
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
    reported = False
    try:
        store = open_store(setup.store)
        transaction = store.begin(request.name, request.identity)
        digest = _write(setup, transaction, writes or itertools.chain(*setup.rounds), buffer)
        if setup.template is None:
            result.digest = digest
            reported = True  # rank 0 may see it, and commit the files, even if this raises
            _count(result, before)
            _report(setup, transaction, result)
            return result
        others = _collect(transaction, setup.world_size)
        digests = [digest, *(other.digest for other in others)]
        manifest = setup.template.fill(request.facts, transaction.prefix, digests)
        store.commit(transaction, manifest.dump())
    except Exception as error:
        result.problem = in_words(error)
        if store is not None and transaction is not None:
            _give_up(setup, store, transaction, result, reported)
        return result
    result.place = store.locate(request.name)
    result.size = sum(file.size for file in setup.template.files)
    result.seconds, result.ended = time.monotonic() - request.began, time.time()
    result.warnings = purge(store, setup.retention)
    _count(result, before)
    result.user_seconds += sum(other.user_seconds for other in others)
    result.system_seconds += sum(other.system_seconds for other in others)
    return result


def _count(result: SaveResult, before: struct_rusage) -> None:
    """Note the processor time of this process since `before`."""
    now = getrusage(RUSAGE_SELF)
    result.user_seconds = now.ru_utime - before.ru_utime
    result.system_seconds = now.ru_stime - before.ru_stime


def _give_up(
    setup: WriterSetup, store: Store, transaction: Transaction, result: SaveResult, reported: bool
) -> None:
    """Remove the transaction's files on rank 0; on others report to rank 0, whose disk may be
    another one, and remove the rank's own unless `reported` as written."""
    if setup.rank == 0:
        store.abandon(transaction)
        return
    for file in setup.files:
        if not (file.shared or reported):
            with contextlib.suppress(OSError):
                transaction.discard(file.name)  # on a full disk, room for the report
    with contextlib.suppress(OSError):  # this rank also ends the run by itself
        _report(setup, transaction, result)


def _report_name(rank: int) -> str:
    return f"rank-{rank:05d}.report"


def _report(setup: WriterSetup, transaction: Transaction, result: SaveResult) -> None:
    """Report to rank 0; the line break at the end marks a report that is all there."""
    transaction.put(_report_name(setup.rank), result.model_dump_json().encode() + b"\n")


def _collect(transaction: Transaction, world_size: int) -> list[SaveResult]:
    """The other ranks' reports, as soon as all have written. Raises CheckpointError when one has
    failed."""
    reports = []
    for rank in range(1, world_size):
        pause = 0.001
        while not (data := transaction.get(_report_name(rank)) or b"").endswith(b"\n"):
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        result = SaveResult.model_validate_json(data)
        if result.problem:
            raise CheckpointError(f"rank {rank}: {result.problem}")
        reports.append(result)
    for rank in range(1, world_size):
        transaction.discard(_report_name(rank))
    return reports


def _write(
    setup: WriterSetup, transaction: Transaction, writes: Iterable[Write], buffer: memoryview
) -> int:
    """Write the buffer to the files; returns the digest of the checksums."""
    found: list[int] = []
    for number, group in itertools.groupby(writes, key=lambda write: write.file):
        file = setup.files[number]
        with transaction.create(file.name, file.size, shared=file.shared) as sink:
            for write in group:
                data = buffer[write.start : write.start + write.size]
                found += block_sums.sums(data) if write.piece else ()
                for offset, low, high in write.extent.segments(write.begin, write.size):
                    sink.write(offset, data[low:high])
    return put_sums(transaction, setup.rank, found)


def put_sums(transaction: Transaction, rank: int, sums: Sequence[int]) -> int:
    """Write the file of a rank's checksums; returns its digest."""
    data = block_sums.pack(sums)
    transaction.put(sums_name(rank), data)
    return xxh3_64_intdigest(data)


if __name__ == "__main__":
    main(sys.argv[1:])
