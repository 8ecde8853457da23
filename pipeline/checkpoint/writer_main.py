"""The process that writes one rank's part of every checkpoint, while training goes on.

`python -m pipeline.checkpoint.writer_main DESCRIPTOR PARENT`: DESCRIPTOR is the snapshot buffer's.
Standard input is one line of JSON with the Setup, then a line with a SaveRequest for each
checkpoint, whose first round is then in the buffer, and an empty line for each further round;
standard output is one line of JSON for each checkpoint, a SaveResult, and before it an empty line
for each round whose place in the buffer is wanted for another. The writer of rank 0 also waits for
what the others report in the transaction, commits, and then deletes what need not be kept.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import mmap
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel
from xxhash import xxh3_64_intdigest

from pipeline.checkpoint import safetensors_format
from pipeline.checkpoint.division import Run
from pipeline.checkpoint.manifest import DataFile, Manifest, Part, TensorEntry
from pipeline.checkpoint.retention import Retention, forget
from pipeline.checkpoint.store import Sink, Store, Transaction, open_store
from pipeline.distributed.signals import ENDING
from pipeline.errors import CheckpointError, in_words
from pipeline.utils.process_tree import die_with
from pipeline.utils.terminal import guard

LONGEST_PAUSE = 0.2
"""Seconds between two looks for the other ranks' reports."""


class NewFile(BaseModel):
    """A file to write; its first writer also writes what precedes the data."""

    name: str
    size: int
    shared: bool


class Write(NamedTuple):
    """Bytes of the arena that go to a place of file number `file`. `piece` is false for what has no
    block checksums (headers)."""

    file: int
    offset: int
    start: int
    size: int
    piece: bool


class ManifestTemplate(BaseModel):
    """What all manifests of a run have in common; checksums and names' prefix are still missing."""

    tensors: Sequence[TensorEntry]
    runs: Sequence[Sequence[Run]]
    files: Sequence[DataFile]
    sums: Sequence[str]
    retention: Retention


class Setup(BaseModel):
    """What one rank writes at every checkpoint."""

    store: str
    rank: int
    size: int
    """Bytes of the arena."""
    files: Sequence[NewFile]
    rounds: Sequence[Sequence[Write]]
    """File by file, each from its start to its end."""
    sums: str
    skeleton: ManifestTemplate | None
    """On rank 0."""


class SaveRequest(BaseModel):
    """One checkpoint."""

    name: str
    identity: str
    facts: Mapping[str, Any] = {}
    """On rank 0: the manifest's fields that differ from one checkpoint to the next."""


class Report(BaseModel):
    """What a rank's writer tells that of rank 0, in the attempt."""

    digest: int = 0
    problem: str = ""


class SaveResult(BaseModel):
    """What a writer tells its rank."""

    name: str
    problem: str = ""
    place: str = ""
    size: int = 0
    """Bytes of the whole checkpoint's data, on rank 0."""
    seconds: float = 0.0
    warnings: Sequence[str] = ()


def main(argv: Sequence[str]) -> None:
    """Write until standard input ends."""
    die_with(int(argv[1]))
    guard()
    # terminals and schedulers send these to all processes of a run; the rank decides what they mean
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    orders, told = sys.stdin.buffer, sys.stdout.buffer  # UTF-8, whatever the locale
    setup = Setup.model_validate_json(orders.readline())
    arena = memoryview(mmap.mmap(int(argv[0]), max(setup.size, 1), prot=mmap.PROT_READ))

    def filled(number: int) -> None:
        if number and not orders.readline():
            raise CheckpointError("the process that trains has ended")

    def taken(number: int) -> None:
        if number + 2 < len(setup.rounds):
            told.write(b"\n")
            told.flush()

    for line in orders:
        if not line.strip():  # of a save that has failed
            continue
        outcome = carry_out(setup, SaveRequest.model_validate_json(line), arena, filled, taken)
        told.write(outcome.model_dump_json().encode() + b"\n")
        told.flush()


def carry_out(
    setup: Setup,
    job: SaveRequest,
    arena: memoryview,
    filled: Callable[[int], None] = lambda number: None,
    taken: Callable[[int], None] = lambda number: None,
) -> SaveResult:
    """Write, report, and on rank 0 commit. Whatever goes wrong is told, not raised. `filled`
    returns when a round is in the arena; `taken` is told that it is in the files."""
    began = time.perf_counter()
    outcome = SaveResult(name=job.name)
    attempt = None
    try:
        store = open_store(setup.store)
        attempt = store.attempt(job.name, job.identity)
        writes = _in_turn(setup.rounds, filled, taken)
        report = Report(digest=_write(setup, attempt, writes, arena))
        if setup.skeleton is None:
            _report(setup, attempt, report)
            return outcome
        digests = _collect(setup.skeleton, attempt, report)
        attempt.commit(_manifest(setup.skeleton, job, attempt.prefix, digests).dump())
    except Exception as error:
        outcome.problem = _problem(setup, error)
        if attempt is not None:
            _give_up(setup, attempt, outcome.problem)
        return outcome
    outcome.place = store.locate(job.name)
    outcome.size = sum(file.size for file in setup.skeleton.files)
    outcome.seconds = time.perf_counter() - began
    outcome.warnings = _forget(store, setup.skeleton.retention)
    return outcome


def report_name(rank: int) -> str:
    """The file by which a rank's writer reports."""
    return f"rank-{rank:05d}.report"


class _Failed(CheckpointError):
    """Another rank's writer has failed."""


def _problem(setup: Setup, error: Exception) -> str:
    if setup.skeleton is None and isinstance(error, FileNotFoundError):
        return f"rank 0 gave up, or somebody removed the files: {error.filename} is gone"
    return in_words(error)


def _give_up(setup: Setup, attempt: Transaction, problem: str) -> None:
    """Rank 0 removes the attempt; another tells rank 0, whose disk may be another one."""
    if setup.skeleton is not None:
        attempt.abandon()
        return
    for file in setup.files:
        if not file.shared:
            with contextlib.suppress(OSError):
                attempt.discard(file.name)  # on a full disk, room for the report
    with contextlib.suppress(OSError):  # this rank also ends the run by itself
        _report(setup, attempt, Report(problem=problem))


def _report(setup: Setup, attempt: Transaction, report: Report) -> None:
    """Ends with a line break, which tells it from one that is only half there."""
    attempt.put(report_name(setup.rank), report.model_dump_json().encode() + b"\n")


def _reported(attempt: Transaction, rank: int) -> Report:
    """What another rank has to say, as soon as it does."""
    pause = 0.001
    while not (data := attempt.get(report_name(rank)) or b"").endswith(b"\n"):
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return Report.model_validate_json(data)


def _forget(store: Store, retention: Retention) -> list[str]:
    """Warnings: the checkpoint is there, whatever becomes of older ones."""
    warnings = []
    try:
        for warning in forget(store, retention):
            warnings.append(warning)
    except Exception as error:
        warnings.append(f"older checkpoints cannot be deleted: {in_words(error)}")
    return warnings


def _in_turn(
    rounds: Sequence[Sequence[Write]], filled: Callable[[int], None], taken: Callable[[int], None]
) -> Iterator[Write]:
    """Every write, when there is something to write. One is done when the next is asked for."""
    for number, writes in enumerate(rounds):
        filled(number)
        yield from writes
        taken(number)


def _write(setup: Setup, attempt: Transaction, writes: Iterator[Write], arena: memoryview) -> int:
    """Write the arena to the files; the digest of the checksums."""
    found: list[int] = []
    for number, group in itertools.groupby(writes, key=lambda write: write.file):
        file = setup.files[number]
        with attempt.create(file.name, file.size, shared=file.shared) as sink:
            for write in group:
                found.extend(_copy(sink, write, arena))
    data = safetensors_format.pack(found)
    attempt.put(setup.sums, data)
    return xxh3_64_intdigest(data)


def _copy(sink: Sink, write: Write, arena: memoryview) -> Iterator[int]:
    for start in range(0, write.size, safetensors_format.CHUNK):
        size = min(safetensors_format.CHUNK, write.size - start)
        data = arena[write.start + start : write.start + start + size]
        if write.piece:
            yield from safetensors_format.sums(data)
        sink.write(write.offset + start, data)


def _collect(skeleton: ManifestTemplate, attempt: Transaction, own: Report) -> list[int]:
    """Every rank's digest, as soon as all have written. Raises _Failed when one could not."""
    digests = [own.digest]
    for rank in range(1, len(skeleton.sums)):
        report = _reported(attempt, rank)
        if report.problem:
            raise _Failed(f"rank {rank}: {report.problem}")
        digests.append(report.digest)
    for rank in range(1, len(skeleton.sums)):
        attempt.discard(report_name(rank))
    return digests


def _manifest(
    skeleton: ManifestTemplate, job: SaveRequest, prefix: str, digests: Sequence[int]
) -> Manifest:
    parts = [
        Part(sums=prefix + sums, digest=digest)
        for sums, digest in zip(skeleton.sums, digests, strict=True)
    ]
    files = [file.model_copy(update={"name": prefix + file.name}) for file in skeleton.files]
    return Manifest(
        **job.facts,
        written=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        tensors=skeleton.tensors,
        runs=skeleton.runs,
        files=files,
        parts=parts,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
