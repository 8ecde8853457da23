"""The writer process: faults that it survives, errors after others, and reports of failed ranks."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import resource
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.checkpoint.division import Tile
from pipeline.checkpoint.file_layout import Write
from pipeline.checkpoint.snapshot import SnapshotBuffer
from pipeline.checkpoint.store import LocalStore
from pipeline.checkpoint.writer import WriterProcess, WriterSetup, carry_out
from pipeline.distributed.signals import ENDING
from pipeline.errors import CheckpointError
from tests.support.tiny_store import Tiny, digests, job, read_digests

NAME = "step-00000001"


@contextlib.contextmanager
def started(setup: WriterSetup, content: memoryview | None = None) -> Iterator[WriterProcess]:
    buffer = SnapshotBuffer(setup.buffer_size)
    if content is not None:
        buffer.memory[:] = content
    writer = WriterProcess(setup, buffer.descriptor)
    yield writer
    writer.close()
    buffer.close()


@contextlib.contextmanager
def both(root: Path) -> Iterator[list[WriterProcess]]:
    """Start two ranks' writers, with the data of step 1 in their buffers."""
    tiny = Tiny(str(root))
    with ExitStack() as stack:
        yield [
            stack.enter_context(started(setup, tiny.arena(rank, 1)))
            for rank, setup in enumerate(tiny.setups)
        ]


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[list[WriterProcess]]:
    with both(tmp_path) as made:
        yield made


def test_neither_the_locale_nor_the_users_files_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    (tmp_path / "pipeline.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "f\u00fcr \u4f60"
    with both(root) as writers:
        for writer in writers:
            writer.announce(job(1, "x"))
        outcomes = [writer.wait() for writer in writers]
    assert [outcome.problem for outcome in outcomes] == ["", ""]
    assert outcomes[0].address == str(root / NAME)
    assert Path(outcomes[0].address, "manifest.json").is_file()


def pid(writer: WriterProcess) -> int:
    return writer._process.pid


def test_outcomes(writers: list[WriterProcess], tmp_path: Path) -> None:
    assert [writer.poll() for writer in writers] == [None, None]
    for writer in writers:
        writer.announce(job(1, "x"))
    outcomes = [writer.wait() for writer in writers]
    assert [outcome.problem for outcome in outcomes] == ["", ""]
    assert [outcome.address for outcome in outcomes] == [str(tmp_path / NAME), ""]
    assert outcomes[0].size == sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors"))
    assert read_digests(LocalStore(tmp_path), NAME) == digests(1)


def test_signals_to_the_whole_run_do_not_stop_a_save(
    writers: list[WriterProcess], tmp_path: Path
) -> None:
    """Rank 1 has no order yet, so rank 0's writer is waiting when the signals come."""
    writers[0].announce(job(1, "x"))
    while not list(tmp_path.glob("*.tmp-x/*.sums")):
        assert writers[0].poll() is None
    for number in ENDING:
        os.kill(pid(writers[0]), number)
    assert writers[0].poll() is None
    writers[1].announce(job(1, "x"))
    assert [writer.wait().problem for writer in writers] == ["", ""]
    assert read_digests(LocalStore(tmp_path), NAME) == digests(1)


def test_signals_to_a_writer_that_is_just_starting(writers: list[WriterProcess]) -> None:
    """Slurm sends them to every process of a job, at any moment."""
    for number in ENDING:
        os.kill(pid(writers[1]), number)
    writers[1].announce(job(1, "x"))
    assert writers[1].wait().problem == ""


def test_a_dead_writer_is_told_by_whatever_asks_it(writers: list[WriterProcess]) -> None:
    os.kill(pid(writers[1]), signal.SIGKILL)
    os.waitid(os.P_PID, pid(writers[1]), os.WEXITED | os.WNOWAIT)
    problem = r"the process that writes rank 1's checkpoints ended \(SIGKILL\)"
    for ask in (writers[1].poll, writers[1].wait, lambda: writers[1].announce(job(1, "x"))):
        with pytest.raises(CheckpointError, match=problem):
            ask()


def test_a_failure_told_together_with_a_round_is_not_overlooked(tmp_path: Path) -> None:
    setup = Tiny(str(tmp_path)).setups[1]
    impossible = Write(
        99, Tile(0, 1), place_offset=0, buffer_offset=0, size=1, key="", first_element=0
    )
    rounds = [*setup.rounds, [impossible], []]
    with started(setup.model_copy(update={"rounds": rounds})) as writer:
        writer.announce(job(1, "x"))
        writer.announce()
        while waiting(writer) < len("\n{}\n"):
            pass
        assert writer.wait() is None
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
        writer = stack.enter_context(started(tiny.setups[1]))
        assert writer.poll() is None
        writer.announce(job(1, "x"))
        assert writer.wait().problem == ""


def test_the_start_of_a_writer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one reads nothing, as Python while it starts, and then ends."""
    idle = [sys.executable, "-c", "import time; time.sleep(2)"]
    monkeypatch.setattr("pipeline.utils.processes.module_command", lambda *words: idle)
    setup = Tiny(str(tmp_path)).setups[0]
    much = setup.model_copy(update={"files": [*setup.files] * 20_000})
    with started(much):
        pass


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
    assert read_digests(LocalStore(tmp_path), "step-00000001") == digests(1)
