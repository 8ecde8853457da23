"""The interface of the places where checkpoints are kept: a file system or an object store.

A store holds checkpoints under the names `step-NNNNNNNN`. One is written in a transaction, whose
files nobody looks at, and appears whole when the transaction is committed.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Self

_STEP = re.compile(r"step-([0-9]{8,18})")
"""Most digits of a step: no training has 10^18 steps, and other tools can count them."""


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


class Sink(ABC):
    """A file that is being written; as a context, finished at its end or abandoned."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abandon()
            return
        try:
            self.finish()
        except BaseException:
            self.abandon()
            raise

    @abstractmethod
    def write(self, offset: int, data: memoryview) -> None:
        """Put `data` at byte `offset`."""

    @abstractmethod
    def finish(self) -> None:
        """Return when the file is durable."""

    @abstractmethod
    def abandon(self) -> None:
        """Release the file after a failure; raises nothing."""


class Transaction:
    """A checkpoint that is being written, by all processes that gave the same name and identity.
    Their names begin with `prefix` in the manifest, and until the commit they lie in `folder`."""

    def __init__(self, store: Store, name: str, folder: str, prefix: str) -> None:
        self._store = store
        self.name = name
        self.folder = folder
        self.prefix = prefix

    def create(self, file: str, size: int, *, shared: bool) -> Sink:
        """A new file of `size` bytes; with `shared`, other processes write other parts of it.
        Raises OSError when there is no room."""
        return self._store.create(self.folder, self.prefix + file, size, shared=shared)

    def put(self, file: str, data: bytes) -> None:
        """Write a small file durably. Before this returns, and even if it raises, `get` may see the
        file or a part of it."""
        self._store.put(self.folder, self.prefix + file, data)

    def get(self, file: str) -> bytes | None:
        """A file that any of the processes has put; None until then."""
        try:
            return self._store.get(self.folder, self.prefix + file)
        except FileNotFoundError:
            return None

    def discard(self, file: str) -> None:
        """Remove a file."""
        self._store.remove(self.folder, self.prefix + file)


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
    def create(self, name: str, file: str, size: int, *, shared: bool) -> Sink:
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
        """Remove what unfinished attempts and deletions left. Only while nobody writes."""


def locate(checkpoint: str) -> tuple[Store, str]:
    """The store that holds the checkpoint at an address, and its name there."""
    root, _, name = checkpoint.rstrip("/").rpartition("/")
    return open_store(root or ("/" if checkpoint.startswith("/") else ".")), name


def open_store(address: str) -> Store:
    """The store at a path, or at an address that fsspec knows (`s3://bucket/folder`)."""
    if "://" in address:
        from pipeline.checkpoint.object_store import ObjectStore

        return ObjectStore(address)
    from pipeline.checkpoint.local_store import LocalStore

    return LocalStore(address)
