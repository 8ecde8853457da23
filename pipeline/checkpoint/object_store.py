"""Checkpoints in a store without rename, through fsspec: the manifest is written last, in one put,
and is what makes a checkpoint exist.

Every attempt's files have unique names, so what a dead attempt left is never mixed with what
another wrote. A checkpoint whose manifest was lost cannot be distinguished from one that was never
committed."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pipeline.checkpoint.manifest import MANIFEST
from pipeline.checkpoint.store import Sink, Transaction, steps_in_order
from pipeline.errors import PipeError
from pipeline.utils.hub import open_address

_ASIDE = re.compile(r"damaged-\d+-" + re.escape(MANIFEST))


class ObjectStore:
    """An address that fsspec opens, with the methods of `LocalStore`. Nothing here needs rename,
    append, or writing at an offset."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        with _as_os_error(self._address):
            # Files that other processes write must be seen.
            fs, root = open_address(address, use_listings_cache=False)
        self.fs = fs
        self._root = root.rstrip("/")
        self._committing: set[Transaction] = set()

    def names(self) -> Sequence[str]:
        folders = steps_in_order(self._entries(""))
        return [name for name in folders if self.size(name, MANIFEST) is not None]

    def locate(self, name: str, file: str = "") -> str:
        return "/".join(part for part in (self._address, name, file) if part)

    def begin(self, name: str, identity: str) -> Transaction:
        self._ask("makedirs", self._path(name, identity), exist_ok=True)
        return Transaction(name, name, f"{identity}/")

    def commit(self, transaction: Transaction, manifest: bytes) -> None:
        self._committing.add(transaction)
        self.put(transaction.name, MANIFEST, manifest)

    def abandon(self, transaction: Transaction) -> None:
        if transaction in self._committing:  # the answer to a put may get lost, and the put be done
            with contextlib.suppress(Exception):
                self.remove(transaction.name, MANIFEST)
        with contextlib.suppress(Exception):
            folder = self._path(transaction.name, transaction.prefix.rstrip("/"))
            self._ask("rm", folder, recursive=True)

    def size(self, name: str, file: str) -> int | None:
        try:
            size: int = self._ask("size", self._path(name, file))
        except FileNotFoundError:
            return None
        return size

    def get(self, name: str, file: str) -> bytes:
        data: bytes = self._ask("cat_file", self._path(name, file))
        return data

    def put(self, name: str, file: str, data: bytes) -> None:
        self._ask("pipe_file", self._path(name, file), data)

    @contextlib.contextmanager
    def create(self, name: str, file: str, size: int, *, shared: bool) -> Iterator[Sink]:
        """A new object, which is there after the body, or not at all if that raises."""
        assert not shared
        path = self._path(name, file)
        opened = self._ask("open", path, "wb")
        try:
            yield functools.partial(_write, opened, path)
            _finish(opened, path)
        except BaseException:
            with contextlib.suppress(Exception):
                opened.discard()
            with contextlib.suppress(Exception):
                opened.forced = True  # or fsspec uploads the rest when it closes the file
                opened.close()
            raise

    def remove(self, name: str, file: str) -> None:
        self._ask("rm_file", self._path(name, file))

    def read(self, name: str, file: str, ranges: Iterable[tuple[int, memoryview]]) -> int:
        path, count = self._path(name, file), 0
        for offset, into in ranges:
            data = self._ask("cat_file", path, start=offset, end=offset + len(into))
            into[: len(data)] = data
            count += len(data)
        return count

    def quarantine(self, name: str) -> str:
        taken = self._entries(name)
        names = (f"damaged-{count}-{MANIFEST}" for count in itertools.count(1))
        aside = next(file for file in names if file not in taken)
        self.put(name, aside, self.get(name, MANIFEST))
        self.remove(name, MANIFEST)
        return self.locate(name, aside)

    def quarantined(self) -> Sequence[str]:
        return [
            self.locate(name, file)
            for name in steps_in_order(self._entries(""))
            for file in sorted(self._entries(name))
            if _ASIDE.fullmatch(file)
        ]

    def delete(self, name: str) -> None:
        self.remove(name, MANIFEST)
        self._clean(name)

    def clean(self) -> None:
        for name in steps_in_order(self._entries("")):
            self._clean(name)

    def _clean(self, name: str) -> None:
        """Remove the attempts that no manifest names; one in quarantine is a manifest too."""
        entries = self._entries(name)
        manifests = [file for file in entries if file == MANIFEST or _ASIDE.fullmatch(file)]
        attempts = [entry for entry, kind in entries.items() if kind == "directory"]
        if not manifests:
            self._ask("rm", f"{self._root}/{name}", recursive=True)
            return
        named = b"".join(self.get(name, file) for file in manifests)
        for attempt in attempts:
            if f'"{attempt}/'.encode() not in named:
                self._ask("rm", self._path(name, attempt), recursive=True)

    def _entries(self, name: str) -> dict[str, str]:
        """Content of the store, or of one of its folders: name -> `file` or `directory`."""
        try:
            found = self._ask("ls", f"{self._root}/{name}".rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        return {
            str(entry["name"]).rstrip("/").rpartition("/")[2]: str(entry["type"]) for entry in found
        }

    def _ask(self, method: str, path: str, *args: Any, **options: Any) -> Any:
        """Call a method of the file system that takes a path first; its failures are OSErrors."""
        with _as_os_error(path):
            return getattr(self.fs, method)(path, *args, **options)

    def _path(self, name: str, file: str) -> str:
        return f"{self._root}/{name}/{file}"


def _write(opened: Any, path: str, offset: int, data: memoryview) -> None:
    assert offset == opened.tell(), "objects can only be written sequentially"
    with _as_os_error(path):
        opened.write(data)


def _finish(opened: Any, path: str) -> None:
    with _as_os_error(path):
        opened.close()


@contextlib.contextmanager
def _as_os_error(where: str) -> Iterator[None]:
    """Raise whatever a library raises as an OSError that names the place.

    A server's answer is never EIO, which is for a broken disk: another try may succeed.
    """
    try:
        yield
    except (FileNotFoundError, PipeError):
        raise
    except OSError as error:
        number = None if error.errno == errno.EIO else error.errno
        raise OSError(number, error.strerror or str(error), error.filename or where) from error
    except Exception as error:
        raise OSError(None, f"{type(error).__name__}: {error}", where) from error
