"""Stores of checkpoints: their interface, and the one that is a folder of a file system.

A store holds checkpoints under the names `step-NNNNNNNN`. One is written in a transaction, whose
files no one looks at, and appears whole when the transaction is committed.

In a folder it is written next to its place and renamed into it. The order of fsyncs: every file,
the transaction's folder, then the rename, then the parent folder. So a checkpoint under its final
name is whole after a power loss.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoint.manifest import MANIFEST
from pipeline.utils import files, foreign
from pipeline.utils.files import PAGE, let_group, naming, remove_folder

_STEP = re.compile(r"step-([0-9]{8,18})")
"""Most digits of a step: no training has 10^18 steps, and other tools can count them."""
_LEFTOVER = re.compile(r"step-\d{8,}\.(tmp|deleted)-.+")
_ASIDE = re.compile(r"step-\d{8,}\.damaged-\d+")
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_REFUSED = _UNSUPPORTED | {errno.ENOMEM}
"""Errors of a direct write that say nothing of one through the cache. A driver in user space may
have no memory for a large one."""
MOST = 1 << 30
"""Most bytes of a manifest, and of other files that are read as a whole."""
LEAST_DIRECT = 1 << 14
"""Bytes of whole pages from which on the way past the system's cache pays."""
DIRECT = 1 << 24
"""Bytes of one call of them: the call returns when the disk has them."""

Sink = Callable[[int, memoryview], None]
"""Puts bytes at an offset of a file that is being written."""


def step_name(step: int) -> str:
    """The name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def step_number(name: str) -> int | None:
    """The reverse of `step_name`; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def steps_in_order(names: Iterable[str]) -> list[str]:
    """The names that a checkpoint can have, oldest first."""
    steps = ((step_number(name), name) for name in names)
    return [name for _, name in sorted((step, name) for step, name in steps if step is not None)]


def is_leftover(name: str) -> bool:
    """Whether a folder is left of a write or a removal that was cut short."""
    return _LEFTOVER.fullmatch(name) is not None


@dataclass(frozen=True)
class Transaction:
    """A checkpoint that is being written, by all processes that gave the same name and identity.
    Their names begin with `prefix` in the manifest, and until the commit they lie in `folder`."""

    store: Store
    name: str
    folder: str
    prefix: str

    def create(self, file: str, size: int, *, shared: bool) -> AbstractContextManager[Sink]:
        """A new file of `size` bytes, which is durable after the body, or abandoned if that raises;
        with `shared`, other processes write other parts of it. Raises OSError when there is no
        room."""
        return self.store.create(self.folder, self.prefix + file, size, shared=shared)

    def put(self, file: str, data: bytes) -> None:
        """Write a small file durably. Before this returns, and even if it raises, `get` may see the
        file or a part of it."""
        self.store.put(self.folder, self.prefix + file, data)

    def get(self, file: str) -> bytes | None:
        """A file that any of the processes has put; None until then."""
        try:
            return self.store.get(self.folder, self.prefix + file)
        except FileNotFoundError:
            return None

    def discard(self, file: str) -> None:
        """Remove a file."""
        self.store.remove(self.folder, self.prefix + file)


class Store(ABC):
    """Checkpoints at one place. Methods raise OSError."""

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Committed checkpoints, also damaged ones, oldest first."""

    @abstractmethod
    def locate(self, name: str, file: str = "") -> str:
        """Path or address, for people."""

    @abstractmethod
    def begin(self, name: str, identity: str) -> Transaction:
        """Begin to write checkpoint `name`, or join the processes that do."""

    @abstractmethod
    def size(self, name: str, file: str) -> int | None:
        """Bytes of a file; None if it is missing."""

    @abstractmethod
    def get(self, name: str, file: str) -> bytes:
        """A whole file."""

    @abstractmethod
    def put(self, name: str, file: str, data: bytes) -> None:
        """Write or replace a small file durably; a crash leaves the old one or the new one."""

    @abstractmethod
    def create(
        self, name: str, file: str, size: int, *, shared: bool
    ) -> AbstractContextManager[Sink]:
        """A new file, as `Transaction.create` describes it."""

    @abstractmethod
    def remove(self, name: str, file: str) -> None:
        """Remove a file."""

    @abstractmethod
    def commit(self, transaction: Transaction, manifest: bytes) -> None:
        """Make the checkpoint appear; when this returns, it survives a power loss."""

    @abstractmethod
    def abandon(self, transaction: Transaction) -> None:
        """Remove a transaction's files, as far as that is possible; raises nothing."""

    @abstractmethod
    def read(self, name: str, file: str, ranges: Iterable[tuple[int, memoryview]]) -> int:
        """Fill memory with a file's bytes, each from an offset on; returns how many there were."""

    @abstractmethod
    def quarantine(self, name: str) -> str:
        """Take a damaged checkpoint out of `names` without deleting it; returns its new place."""

    @abstractmethod
    def quarantined(self) -> Sequence[str]:
        """Places of the checkpoints in quarantine."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a checkpoint; a crash in between never leaves part of one under its name."""

    @abstractmethod
    def clean(self) -> None:
        """Remove what unfinished attempts and deletions left. Only while no one writes."""


class LocalStore(Store):
    """The folder `root`, made at the first write."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)

    def names(self) -> Sequence[str]:
        return steps_in_order(path.name for path in self._entries() if path.is_dir())

    def locate(self, name: str, file: str = "") -> str:
        return str(self._root / name / file)

    def begin(self, name: str, identity: str) -> Transaction:
        transaction = Transaction(self, name, f"{name}.tmp-{identity}", "")
        if not self._root.is_dir():
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            let_group(self._root, self._root.parent)
            _sync(self._root.parent)
        folder = self._root / transaction.folder
        folder.mkdir(exist_ok=True, mode=0o700)
        let_group(folder, folder.parent)
        return transaction

    def commit(self, transaction: Transaction, manifest: bytes) -> None:
        self.put(transaction.folder, MANIFEST, manifest)
        (self._root / transaction.folder).rename(self._root / transaction.name)
        _sync(self._root)

    def abandon(self, transaction: Transaction) -> None:
        # Rename it first, so that nobody continues to write into it.
        folder = self._root / transaction.folder
        doomed = folder.with_name(folder.name.replace(".tmp-", ".deleted-"))
        with contextlib.suppress(OSError):
            folder.rename(doomed)
            remove_folder(doomed)
        remove_folder(folder)

    def size(self, name: str, file: str) -> int | None:
        try:
            return (self._root / name / file).stat().st_size
        except FileNotFoundError:
            return None

    def get(self, name: str, file: str) -> bytes:
        folder = self._root / name
        return foreign.read_whole(folder / file, most=MOST, within=folder)

    def put(self, name: str, file: str, data: bytes) -> None:
        path = self._root / name / file
        partial = path.with_name(path.name + ".partial")
        partial.unlink(missing_ok=True)
        with _File(partial, len(data), shared=False, direct=False) as write:
            write(0, memoryview(data))
        # Opened before the rename: rank 0 moves the folder when it sees the last report.
        with naming(path.parent), contextlib.ExitStack() as stack:
            folder = os.open(path.parent, os.O_RDONLY)
            stack.callback(os.close, folder)
            partial.rename(path)
            os.fsync(folder)

    def create(
        self, name: str, file: str, size: int, *, shared: bool
    ) -> AbstractContextManager[Sink]:
        return _File(self._root / name / file, size, shared=shared)

    def remove(self, name: str, file: str) -> None:
        (self._root / name / file).unlink()

    def read(self, name: str, file: str, ranges: Iterable[tuple[int, memoryview]]) -> int:
        folder = self._root / name
        with foreign.open_regular(folder / file, within=folder) as stream:
            return sum(files.read_at(stream.fileno(), offset, into) for offset, into in ranges)

    def quarantine(self, name: str) -> str:
        paths = (self._root / f"{name}.damaged-{count}" for count in itertools.count(1))
        aside = next(path for path in paths if not path.exists())
        (self._root / name).rename(aside)
        _sync(self._root)
        return str(aside)

    def quarantined(self) -> Sequence[str]:
        return sorted(str(path) for path in self._entries() if _ASIDE.fullmatch(path.name))

    def delete(self, name: str) -> None:
        doomed = self._root / f"{name}.deleted-{os.getpid()}"
        (self._root / name).rename(doomed)
        _sync(self._root)  # or a power loss may bring the name back, with some of the files gone
        shutil.rmtree(doomed)

    def clean(self) -> None:
        for path in self._entries():
            if is_leftover(path.name):
                remove_folder(path)

    def _entries(self) -> Iterator[Path]:
        if self._root.is_dir():
            yield from self._root.iterdir()


class _File:
    """A new file, which is durable after the body, or closed if that raises.

    With `direct`, whole pages go to the disk from where they are in memory, if file system and disk
    take them so. That takes a fraction of the processors' time: nothing is copied, no memory is
    looked for and given back, and nothing is left for the system to write after the program.
    """

    def __init__(self, path: Path, size: int, *, shared: bool, direct: bool = True) -> None:
        self._path = path
        self._direct: int | None = None
        self._direct_worked = False
        """Whether the disk has taken any pages directly."""
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags | os.O_CREAT | (0 if shared else os.O_EXCL), 0o600)
        files.let_group(self._file, path.parent)
        try:
            # Where a file system cannot reserve room, the C library writes zeros: over what other
            # processes have written by then.
            with naming(path), _tolerated(_UNSUPPORTED):
                if size and not shared:
                    os.posix_fallocate(self._file, 0, size)
            with _tolerated(_UNSUPPORTED):
                self._direct = os.open(path, flags | os.O_DIRECT) if direct else None
        except OSError:
            os.close(self._file)
            raise

    def __enter__(self) -> Sink:
        return self._write

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        explained = naming(self._path) if kind is None else contextlib.suppress(OSError)
        with explained, contextlib.ExitStack() as stack:
            stack.callback(os.close, self._file)
            self._close_direct()
            if kind is None:
                os.fsync(self._file)

    def _write(self, offset: int, data: memoryview) -> None:
        begin = -offset % PAGE
        end = begin + (len(data) - begin) // PAGE * PAGE
        parts = [(offset, data)]
        if end - begin >= LEAST_DIRECT and self._write_direct(offset + begin, data[begin:end]):
            parts = [(offset, data[:begin]), (offset + end, data[end:])]
        with naming(self._path):
            for at, part in parts:
                files.write_at(self._file, at, part)

    def _write_direct(self, offset: int, data: memoryview) -> bool:
        """Write past the system's cache; returns whether that was done."""
        if self._direct is None:
            return False
        try:
            with naming(self._path):
                files.write_at(self._direct, offset, data, step=DIRECT)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            if not self._direct_worked:
                self._close_direct()
            return False  # at least these pages lie where the disk cannot fetch them
        self._direct_worked = True
        return True

    def _close_direct(self) -> None:
        direct, self._direct = self._direct, None
        if direct is not None:
            os.close(direct)


@contextlib.contextmanager
def _tolerated(numbers: set[int]) -> Iterator[None]:
    """Ignore system errors of these numbers."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


def _sync(folder: Path) -> None:
    with naming(folder):
        files.sync(folder)
