"""The store of checkpoints that is a folder of a file system; `object_store` has the same methods.

A store holds checkpoints under the names `step-NNNNNNNN`. One is written in a transaction, whose
files no one looks at, and appears whole when the transaction is committed: in a folder it is
written next to its place and renamed into it. The order of fsyncs: every file,
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from pipeline.checkpoint.manifest import MANIFEST
from pipeline.utils import files, foreign
from pipeline.utils.files import PAGE, let_group, naming, remove_folder

_STEP = re.compile(r"step-([0-9]{8,18})")
"""Most digits of a step: no training has 10^18 steps, and other tools can count them."""
LEFTOVER = re.compile(r"step-\d{8,}\.(tmp|deleted)-.+")
"""Folders that are left of a write or a removal that was cut short."""
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


class Transaction(NamedTuple):
    """A checkpoint that is being written, by all processes that gave the same name and identity.
    Their names begin with `prefix` in the manifest, and until the commit they lie in `folder`."""

    name: str
    folder: str
    prefix: str

    def at(self, file: str) -> tuple[str, str]:
        """The folder and the name of a file, as the methods of a store take them."""
        return self.folder, self.prefix + file


class LocalStore:
    """The folder `root`, made at the first write. As of every store, methods raise OSError."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)

    def names(self) -> Sequence[str]:
        """Committed checkpoints, also damaged ones, oldest first."""
        found = [(int(path.name[5:]), path) for path in self._named(_STEP) if path.is_dir()]
        return [path.name for _, path in sorted(found)]

    def locate(self, name: str, file: str = "") -> str:
        """Path or address, for people."""
        return str(self._root / name / file)

    def begin(self, name: str, identity: str) -> Transaction:
        """Begin to write checkpoint `name`, or join the processes that do."""
        folder = self._root / f"{name}.tmp-{identity}"
        if not self._root.is_dir():
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            let_group(self._root, self._root.parent)
            files.sync(self._root.parent)
        folder.mkdir(exist_ok=True, mode=0o700)
        let_group(folder, folder.parent)
        return Transaction(name, folder.name, "")

    def commit(self, transaction: Transaction, manifest: bytes) -> None:
        """Make the checkpoint appear; when this returns, it survives a power loss."""
        self.put(transaction.folder, MANIFEST, manifest)
        (self._root / transaction.folder).rename(self._root / transaction.name)
        files.sync(self._root)

    def abandon(self, transaction: Transaction) -> None:
        """Remove a transaction's files, as far as that is possible; raises nothing."""
        # Rename it first, so that nobody continues to write into it.
        folder = self._root / transaction.folder
        doomed = folder.with_name(folder.name.replace(".tmp-", ".deleted-"))
        with contextlib.suppress(OSError):
            folder.rename(doomed)
            remove_folder(doomed)
        remove_folder(folder)

    def size(self, name: str, file: str) -> int | None:
        """Bytes of a file; None if it is missing."""
        try:
            return (self._root / name / file).stat().st_size
        except FileNotFoundError:
            return None

    def get(self, name: str, file: str) -> bytes:
        """A whole file, also one that another process has put."""
        folder = self._root / name
        return foreign.read_whole(folder / file, most=MOST, within=folder)

    def put(self, name: str, file: str, data: bytes) -> None:
        """Write or replace a small file durably; a crash leaves the old one or the new one. Before
        this returns, and even if it raises, `get` may see the file."""
        path = self._root / name / file
        partial = path.with_name(path.name + ".partial")
        partial.unlink(missing_ok=True)
        with naming(partial), files.opened(partial, "xb") as stream:
            files.write_at(stream.fileno(), 0, memoryview(data))
            os.fsync(stream.fileno())
        # Opened before the rename: rank 0 moves the folder when it sees the last report.
        with naming(path.parent), contextlib.ExitStack() as stack:
            folder = os.open(path.parent, os.O_RDONLY)
            stack.callback(os.close, folder)
            partial.rename(path)
            os.fsync(folder)

    def create(
        self, name: str, file: str, size: int, *, shared: bool
    ) -> AbstractContextManager[Sink]:
        """A new file of `size` bytes, which is durable after the body, or abandoned if that raises;
        with `shared`, other processes write other parts of it. Raises OSError when there is no
        room."""
        return _new_file(self._root / name / file, size, shared=shared)

    def remove(self, name: str, file: str) -> None:
        """Remove a file."""
        (self._root / name / file).unlink()

    def read(self, name: str, file: str, ranges: Iterable[tuple[int, memoryview]]) -> int:
        """Fill memory with a file's bytes, each from an offset on; returns how many there were."""
        folder = self._root / name
        with foreign.open_regular(folder / file, within=folder) as stream:
            return sum(files.read_at(stream.fileno(), offset, into) for offset, into in ranges)

    def quarantine(self, name: str) -> str:
        """Take a damaged checkpoint out of `names` without deleting it; returns its new place."""
        paths = (self._root / f"{name}.damaged-{count}" for count in itertools.count(1))
        aside = next(path for path in paths if not path.exists())
        (self._root / name).rename(aside)
        files.sync(self._root)
        return str(aside)

    def quarantined(self) -> Sequence[str]:
        """Places of the checkpoints in quarantine."""
        return sorted(map(str, self._named(_ASIDE)))

    def delete(self, name: str) -> None:
        """Remove a checkpoint; a crash in between never leaves part of one under its name."""
        doomed = self._root / f"{name}.deleted-{os.getpid()}"
        (self._root / name).rename(doomed)
        files.sync(self._root)  # or a power loss may bring the name back, with some files gone
        shutil.rmtree(doomed)

    def clean(self) -> None:
        """Remove what unfinished attempts and deletions left. Only while no one writes."""
        for path in self._named(LEFTOVER):
            remove_folder(path)

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        """What is in the folder under such names."""
        there = self._root.iterdir() if self._root.is_dir() else ()
        return [path for path in there if pattern.fullmatch(path.name)]


@contextlib.contextmanager
def _new_file(path: Path, size: int, *, shared: bool) -> Iterator[Sink]:
    """A new file, which is durable after the body, or closed if that raises.

    Whole pages go to the disk from where they are in memory, if file system and disk take them so.
    That takes a fraction of the processors' time: nothing is copied, no memory is looked for and
    given back, and nothing is left for the system to write after the program.
    """
    flags, past_cache = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, -1
    has_worked = False  # the disk has taken pages directly
    file = os.open(path, flags | os.O_CREAT | (0 if shared else os.O_EXCL), 0o600)
    descriptors = contextlib.ExitStack()
    descriptors.callback(os.close, file)

    def write(offset: int, data: memoryview) -> None:
        nonlocal past_cache, has_worked
        begin = -offset % PAGE
        end = begin + (len(data) - begin) // PAGE * PAGE
        parts = [(offset, data)]
        with naming(path):
            if past_cache >= 0 and end - begin >= LEAST_DIRECT:
                try:
                    files.write_at(past_cache, offset + begin, data[begin:end], step=DIRECT)
                    has_worked = True
                    parts = [(offset, data[:begin]), (offset + end, data[end:])]
                except OSError as error:
                    if error.errno not in _REFUSED:
                        raise
                    # At least these pages lie where the disk cannot fetch them.
                    past_cache = past_cache if has_worked else -1
            for at, part in parts:
                files.write_at(file, at, part)

    try:
        files.let_group(file, path.parent)
        # Where a file system cannot reserve room, the C library writes zeros: over what other
        # processes have written by then.
        if size and not shared:
            with _where_supported(path):
                os.posix_fallocate(file, 0, size)
        with _where_supported(path):
            past_cache = os.open(path, flags | os.O_DIRECT)
            descriptors.callback(os.close, past_cache)
        yield write
        with naming(path):
            os.fsync(file)
    except BaseException:
        with contextlib.suppress(OSError):
            descriptors.close()
        raise
    with naming(path):
        descriptors.close()


@contextlib.contextmanager
def _where_supported(path: Path) -> Iterator[None]:
    """Ignore that a file system cannot do something; name `path` in other errors."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise OSError(error.errno, error.strerror, str(path)) from None
