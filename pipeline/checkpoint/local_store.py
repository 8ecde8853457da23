"""Checkpoints in a folder of a file system: written beside their place and renamed into it.

The order of fsyncs: every file, the transaction's folder, then the rename, then the parent folder.
So a checkpoint under its final name is whole after a power loss.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pipeline.checkpoint.manifest import MANIFEST
from pipeline.checkpoint.store import Sink, Store, Transaction, steps_in_order
from pipeline.utils.files import (
    PAGE,
    let_group_enter,
    let_group_read,
    naming,
    read_at,
    remove_folder,
    sync,
    write_at,
)
from pipeline.utils.foreign import open_regular, read_whole

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


def is_leftover(name: str) -> bool:
    """Return whether a folder is what is left of a write or a removal that was cut short."""
    return _LEFTOVER.fullmatch(name) is not None


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
            let_group_enter(self._root)
            _sync(self._root.parent)
        folder = self._root / transaction.folder
        folder.mkdir(exist_ok=True, mode=0o700)
        let_group_enter(folder)
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
        return read_whole(folder / file, most=MOST, within=folder)

    def put(self, name: str, file: str, data: bytes) -> None:
        path = self._root / name / file
        partial = path.with_name(path.name + ".partial")
        partial.unlink(missing_ok=True)
        with _LocalSink(partial, len(data)) as sink:
            sink.write(0, memoryview(data))
        # Opened before the rename: rank 0 moves the folder when it sees the last report.
        with _synced(path.parent):
            partial.rename(path)

    def create(self, name: str, file: str, size: int, *, shared: bool) -> Sink:
        return _DirectSink(self._root / name / file, size, shared=shared)

    def remove(self, name: str, file: str) -> None:
        (self._root / name / file).unlink()

    def read(self, name: str, file: str, ranges: Iterable[tuple[int, memoryview]]) -> int:
        folder = self._root / name
        with open_regular(folder / file, within=folder) as stream:
            return sum(read_at(stream.fileno(), offset, into) for offset, into in ranges)

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


class _LocalSink(Sink):
    def __init__(self, path: Path, size: int, *, shared: bool = False) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= 0 if shared else os.O_EXCL
        self._path = path
        self._file = os.open(path, flags, 0o600)
        let_group_read(self._file, path.parent)
        try:
            # Where a file system cannot reserve room, the C library writes zeros: over what other
            # processes have written by then.
            if size and not shared:
                os.posix_fallocate(self._file, 0, size)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                self.abandon()
                raise OSError(error.errno, error.strerror, str(path)) from None

    def write(self, offset: int, data: memoryview) -> None:
        with naming(self._path):
            write_at(self._file, offset, data)

    def finish(self) -> None:
        with naming(self._path):
            os.fsync(self._file)
            os.close(self._file)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)


class _DirectSink(_LocalSink):
    """Sink that gives whole pages to the disk from where they lie, if file system and disk take
    them so. That takes the processors a fraction of the time: nothing is copied, no memory is
    looked for and given back, and nothing is left for the system to write behind the program."""

    def __init__(self, path: Path, size: int, *, shared: bool) -> None:
        self._direct: int | None = None
        self._taken = False
        """Whether the disk has taken any pages so."""
        super().__init__(path, size, shared=shared)
        try:
            self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                self.abandon()
                raise

    def write(self, offset: int, data: memoryview) -> None:
        begin = -offset % PAGE
        end = begin + (len(data) - begin) // PAGE * PAGE
        if end - begin >= LEAST_DIRECT and self._write_direct(offset + begin, data[begin:end]):
            super().write(offset, data[:begin])
            super().write(offset + end, data[end:])
        else:
            super().write(offset, data)

    def finish(self) -> None:
        with naming(self._path):
            self._close_direct()
        super().finish()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._close_direct()
        super().abandon()

    def _write_direct(self, offset: int, data: memoryview) -> bool:
        """Return whether whole pages were written past the system's cache."""
        if self._direct is None:
            return False
        try:
            with naming(self._path):
                write_at(self._direct, offset, data, step=DIRECT)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            if not self._taken:
                self._close_direct()
            return False  # at least these pages lie where the disk cannot fetch them
        self._taken = True
        return True

    def _close_direct(self) -> None:
        direct, self._direct = self._direct, None
        if direct is not None:
            os.close(direct)


@contextlib.contextmanager
def _synced(folder: Path) -> Iterator[None]:
    """Force the entries of a folder to disk after the body, which may see it renamed."""
    with naming(folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield
        with naming(folder):
            os.fsync(descriptor)
    finally:
        with naming(folder):
            os.close(descriptor)


def _sync(folder: Path) -> None:
    with naming(folder):
        sync(folder)
