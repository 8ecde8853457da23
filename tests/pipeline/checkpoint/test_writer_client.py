"""The writer process: the faults that it survives, and the errors after others."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import resource
import signal
import sys
import termios
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.checkpoint.division import KeyedTile
from pipeline.checkpoint.file_layout import SHARDED
from pipeline.checkpoint.local_store import LocalStore
from pipeline.checkpoint.manifest import TensorEntry
from pipeline.checkpoint.snapshot import Snapshot
from pipeline.checkpoint.snapshot_buffer import TAKEN_AT_ONCE, SnapshotBuffer, memory_to_take
from pipeline.checkpoint.staging import plan_staging
from pipeline.checkpoint.tiles import Extent
from pipeline.checkpoint.writer_client import WriterProcess
from pipeline.checkpoint.writer_main import carry_out
from pipeline.checkpoint.writer_protocol import Write
from pipeline.contracts.engine import Fragment
from pipeline.distributed.signals import ENDING
from pipeline.errors import CheckpointError
from tests.support.tiny_store import Tiny, digests, job, read_digests

NAME = "step-00000001"


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[list[WriterProcess]]:
    """Return two ranks' writers, with the data of step 1 in their arenas."""
    tiny = Tiny(str(tmp_path))
    with ExitStack() as stack:
        made = []
        for rank, setup in enumerate(tiny.setups):
            arena = SnapshotBuffer(setup.buffer_size)
            stack.callback(arena.close)
            arena.memory[:] = tiny.arena(rank, 1)
            made.append(WriterProcess(setup, arena))
            stack.callback(made[-1].close)
        yield made


def test_neither_the_locale_nor_the_users_files_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    (tmp_path / "pipeline.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    tiny = Tiny(str(tmp_path / "f\u00fcr \u4f60"))
    with ExitStack() as stack:
        outcomes = []
        for rank, setup in reversed(list(enumerate(tiny.setups))):
            arena = SnapshotBuffer(setup.buffer_size)
            stack.callback(arena.close)
            arena.memory[:] = tiny.arena(rank, 1)
            writer = WriterProcess(setup, arena)
            stack.callback(writer.close)
            writer.begin(job(1, "x"))
            outcomes.append(writer.wait())
    assert [outcome.problem for outcome in outcomes] == ["", ""]
    assert outcomes[1].place == str(tmp_path / "f\u00fcr \u4f60" / NAME)
    assert Path(outcomes[1].place, "manifest.json").is_file()


def pid(writer: WriterProcess) -> int:
    return writer._process.pid


def test_outcomes(writers: list[WriterProcess], tmp_path: Path) -> None:
    assert [writer.poll() for writer in writers] == [None, None]
    for writer in writers:
        writer.begin(job(1, "x"))
    outcomes = [writer.wait() for writer in writers]
    assert [outcome.problem for outcome in outcomes] == ["", ""]
    assert [outcome.place for outcome in outcomes] == [str(tmp_path / NAME), ""]
    assert outcomes[0].size == sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors"))
    assert read_digests(LocalStore(tmp_path), NAME) == digests(1)


def test_signals_to_the_whole_run_do_not_stop_a_save(
    writers: list[WriterProcess], tmp_path: Path
) -> None:
    """Rank 1 has no order yet, so rank 0's writer is waiting when the signals come."""
    writers[0].begin(job(1, "x"))
    while not list(tmp_path.glob("*.tmp-x/*.sums")):
        assert writers[0].poll() is None
    for number in ENDING:
        os.kill(pid(writers[0]), number)
    assert writers[0].poll() is None
    writers[1].begin(job(1, "x"))
    assert [writer.wait().problem for writer in writers] == ["", ""]
    assert read_digests(LocalStore(tmp_path), NAME) == digests(1)


def test_signals_to_a_writer_that_is_just_starting(writers: list[WriterProcess]) -> None:
    """Slurm sends them to every process of a job, at any moment."""
    for number in ENDING:
        os.kill(pid(writers[1]), number)
    writers[1].begin(job(1, "x"))
    assert writers[1].wait().problem == ""


def test_a_dead_writer_is_told_by_whatever_asks_it(writers: list[WriterProcess]) -> None:
    os.kill(pid(writers[1]), signal.SIGKILL)
    os.waitid(os.P_PID, pid(writers[1]), os.WEXITED | os.WNOWAIT)
    problem = r"the process that writes rank 1's checkpoints ended \(SIGKILL\)"
    for ask in (writers[1].poll, writers[1].wait, lambda: writers[1].begin(job(1, "x"))):
        with pytest.raises(CheckpointError, match=problem):
            ask()


def test_a_failure_told_together_with_a_round_is_not_overlooked(tmp_path: Path) -> None:
    setup = Tiny(str(tmp_path)).setups[1]
    impossible = Write(file=99, extent=Extent(0), begin=0, start=0, size=1, piece=False)
    rounds = [*setup.rounds, [impossible], []]
    with ExitStack() as stack:
        arena = SnapshotBuffer(setup.buffer_size)
        stack.callback(arena.close)
        writer = WriterProcess(setup.model_copy(update={"rounds": rounds}), arena)
        stack.callback(writer.close)
        writer.begin(job(1, "x"))
        writer.go_on()
        while waiting(writer) < len("\n{}\n"):
            pass
        assert writer.wait_taken() is None
        outcome = writer.poll()
    assert outcome is not None
    assert outcome.problem


def waiting(writer: WriterProcess) -> int:
    """Return the number of bytes that it has sent and that are still unread."""
    assert writer._process.stdout is not None
    size = array.array("i", [0])
    fcntl.ioctl(writer._process.stdout, termios.FIONREAD, size)
    return size[0]


def test_a_process_with_many_open_files(tmp_path: Path) -> None:
    """The process has more open files than select() can name."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("too few files may be open")
    tiny = Tiny(str(tmp_path))
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        arena = SnapshotBuffer(tiny.setups[1].buffer_size)
        stack.callback(arena.close)
        writer = WriterProcess(tiny.setups[1], arena)
        stack.callback(writer.close)
        assert writer.poll() is None
        writer.begin(job(1, "x"))
        assert writer.wait().problem == ""


def test_folders_on_the_way_are_everybody_s_and_the_last_its_owner_s(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        LocalStore(tmp_path / "team" / "mine" / "checkpoints").begin(NAME, "x")
    finally:
        os.umask(before)
    places = ("team", "team/mine", "team/mine/checkpoints")
    assert [oct((tmp_path / place).stat().st_mode & 0o777) for place in places] == [
        "0o775", "0o775", "0o700"
    ]  # fmt: skip


def test_files_of_a_rank_that_cannot_tell_whether_its_report_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 sees the report and commits, so the files that it speaks of must stay."""
    tiny, real, reports = Tiny(str(tmp_path)), LocalStore.put, []

    def put(store: LocalStore, name: str, file: str, data: bytes) -> None:
        if not file.endswith(".report"):
            return real(store, name, file, data)
        if not reports:
            real(store, name, file, data)
        reports.append(file)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LocalStore, "put", put)
    assert carry_out(tiny.setups[1], job(1, "x"), tiny.arena(1, 1)).problem
    assert carry_out(tiny.setups[0], job(1, "x"), tiny.arena(0, 1)).problem == ""
    assert len(reports) == 2
    assert read_digests(LocalStore(tmp_path), NAME) == digests(1)


def test_the_start_of_a_writer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one reads nothing, as Python while it starts, and then ends."""
    idle = [sys.executable, "-c", "import time; time.sleep(2)"]
    monkeypatch.setattr("pipeline.checkpoint.writer_client.own_module", lambda name: idle)
    setup = Tiny(str(tmp_path)).setups[0]
    much = setup.model_copy(update={"files": [*setup.files] * 20_000})
    buffer = SnapshotBuffer(1)
    WriterProcess(much, buffer).close()
    buffer.close()


def test_the_memory_is_taken_before_a_save_needs_it() -> None:
    size = 3 * TAKEN_AT_ONCE // 2
    buffer = SnapshotBuffer(size)
    assert os.fstat(buffer.descriptor).st_blocks == 0
    buffer.take(torch.device("cpu"))
    assert os.fstat(buffer.descriptor).st_blocks * 512 >= size
    buffer.close()


def test_taking_memory_ends_when_it_is_not_wanted_any_more() -> None:
    buffer = SnapshotBuffer(TAKEN_AT_ONCE)
    buffer.end_taking()
    buffer.take(torch.device("cpu"))
    assert os.fstat(buffer.descriptor).st_blocks == 0
    buffer.close()


def test_memory_that_cannot_be_taken_ends_training_before_a_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    snapshot, writer = lost_tensor({}), None
    wait([snapshot._filled])
    with pytest.raises(CheckpointError, match="cannot be taken: Cannot allocate memory"):
        snapshot.check()
    with pytest.raises(CheckpointError, match="cannot be taken: Cannot allocate memory"):
        snapshot.hand_over(writer, job(1, "x"))  # type: ignore[arg-type]
    snapshot.close()


def test_memory_that_is_still_to_be_taken_is_known() -> None:
    before = memory_to_take()
    buffer = SnapshotBuffer(TAKEN_AT_ONCE + 5)
    assert memory_to_take() == before + TAKEN_AT_ONCE + 5
    buffer.take(torch.device("cpu"))
    assert memory_to_take() == before
    other = SnapshotBuffer(7)
    assert memory_to_take() == before + 7
    other.close()
    assert memory_to_take() == before
    buffer.close()


def lost_tensor(moments: dict[str, int]) -> Snapshot:
    """Return a snapshot for a plan that names a moment, of an engine with `moments` by numel."""
    entry = TensorEntry(key="exp_avg/a", dtype="F32", shape=(9,))
    layout = SHARDED.lay_out(0, [KeyedTile(entry.key, 0, 9)], {entry.key: entry})
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
        snapshot.hand_over(writer, job(1, "x"))
    snapshot.close()


def test_what_does_not_last_is_kept_before_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model may change its buffers in forward; parameters stay until the update."""
    names, go_on, copy = ("a", "b"), threading.Event(), Snapshot._copy
    keys = [f"weight/{name}" for name in names]
    entries = [TensorEntry(key=key, dtype="F32", shape=(9,)) for key in keys]
    layout = SHARDED.lay_out(
        0, [KeyedTile(key, 0, 9) for key in keys], {entry.key: entry for entry in entries}
    )
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
    writer: Any = SimpleNamespace(begin=lambda request: None)
    snapshot.hand_over(writer, job(1, "x"), {"a"})
    for tensor in tensors.values():
        tensor.fill_(1.0)
    assert not snapshot.copied
    go_on.set()
    assert snapshot.wait() is None
    places = {copy.key: copy.place for copy in snapshot.staging.passing}
    memory = snapshot.buffer.memory
    found = [bytes(memory[places[key] : places[key] + 36]) for key in keys]
    assert found == [torch.ones(9).numpy().tobytes(), bytes(36)]
    snapshot.close()
