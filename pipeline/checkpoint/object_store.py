"""Checkpoints in a store without rename, through fsspec: the manifest is written last, in one put,
and is what makes a checkpoint exist.

Every attempt's files have names of their own, so what a dead attempt left is never mixed with what
another wrote. A checkpoint whose manifest was lost cannot be told from one that was never
committed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.checkpoint.manifest import FILE as MANIFEST
from pipeline.checkpoint.store import Sink, Source, Store, Transaction, steps_in_order

_ASIDE = re.compile(r"damaged-\d+-" + re.escape(MANIFEST))


class ObjectStore(Store):
    """An fsspec address. Nothing here needs rename, append, or writing at an offset."""

    shared_files = False

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs

        self._address = address.rstrip("/")
        with _told(self._address):
            # What other processes write must be seen.
            self._fs, root = url_to_fs(address, use_listings_cache=False)
        self._root = root.rstrip("/")

    def names(self) -> Sequence[str]:
        with _told(self._address):
            folders = steps_in_order(self._entries(""))
            return [name for name in folders if self.size(name, MANIFEST) is not None]

    def locate(self, name: str, file: str = "") -> str:
        return "/".join(part for part in (self._address, name, file) if part)

    def attempt(self, name: str, identity: str) -> Transaction:
        return _ObjectAttempt(self._fs, f"{self._root}/{name}", identity)

    def size(self, name: str, file: str) -> int | None:
        try:
            with _told(self.locate(name, file)):
                size: int = self._fs.size(self._path(name, file))
        except FileNotFoundError:
            return None
        return size

    def get(self, name: str, file: str) -> bytes:
        with _told(self.locate(name, file)):
            data: bytes = self._fs.cat_file(self._path(name, file))
            return data

    def replace(self, name: str, file: str, data: bytes) -> None:
        with _told(self.locate(name, file)):
            self._fs.pipe_file(self._path(name, file), data)

    def open(self, name: str, file: str) -> Source:
        return _ObjectSource(self._fs, self._path(name, file))

    def quarantine(self, name: str) -> str:
        with _told(self.locate(name)):
            taken = self._entries(name)
            aside = next(
                file
                for count in itertools.count(1)
                if (file := f"damaged-{count}-{MANIFEST}") not in taken
            )
            self._fs.pipe_file(self._path(name, aside), self.get(name, MANIFEST))
            self._fs.rm_file(self._path(name, MANIFEST))
        return self.locate(name, aside)

    def aside(self) -> Sequence[str]:
        with _told(self._address):
            return [
                self.locate(name, file)
                for name in steps_in_order(self._entries(""))
                for file in sorted(self._entries(name))
                if _ASIDE.fullmatch(file)
            ]

    def delete(self, name: str) -> None:
        with _told(self.locate(name)):
            self._fs.rm_file(self._path(name, MANIFEST))
            self._clean(name)

    def clean(self) -> None:
        with _told(self._address):
            for name in steps_in_order(self._entries("")):
                self._clean(name)

    def _clean(self, name: str) -> None:
        """Remove the attempts that no manifest names, one that is kept aside included."""
        entries = self._entries(name)
        manifests = [file for file in entries if file == MANIFEST or _ASIDE.fullmatch(file)]
        attempts = [entry for entry, kind in entries.items() if kind == "directory"]
        if not manifests:
            self._fs.rm(f"{self._root}/{name}", recursive=True)
            return
        named = b"".join(self.get(name, file) for file in manifests)
        for attempt in attempts:
            if f'"{attempt}/'.encode() not in named:
                self._fs.rm(self._path(name, attempt), recursive=True)

    def _entries(self, name: str) -> dict[str, str]:
        """What is in the store, or in one of its folders: name -> `file` or `directory`."""
        try:
            found = self._fs.ls(f"{self._root}/{name}".rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        return {
            str(entry["name"]).rstrip("/").rpartition("/")[2]: str(entry["type"]) for entry in found
        }

    def _path(self, name: str, file: str) -> str:
        return f"{self._root}/{name}/{file}"


class _ObjectAttempt(Transaction):
    def __init__(self, fs: Any, folder: str, identity: str) -> None:
        self._fs = fs
        self._folder = folder
        self._committing = False
        self.prefix = f"{identity}/"
        with _told(folder):
            fs.makedirs(f"{folder}/{identity}", exist_ok=True)

    def create(self, file: str, size: int, *, shared: bool) -> Sink:
        assert not shared
        with _told(self._path(file)):
            return _ObjectSink(self._fs.open(self._path(file), "wb"), self._path(file))

    def put(self, file: str, data: bytes) -> None:
        with _told(self._path(file)):
            self._fs.pipe_file(self._path(file), data)

    def get(self, file: str) -> bytes | None:
        try:
            with _told(self._path(file)):
                data: bytes = self._fs.cat_file(self._path(file))
        except FileNotFoundError:
            return None
        return data

    def discard(self, file: str) -> None:
        with _told(self._path(file)):
            self._fs.rm_file(self._path(file))

    def commit(self, manifest: bytes) -> None:
        self._committing = True
        with _told(f"{self._folder}/{MANIFEST}"):
            self._fs.pipe_file(f"{self._folder}/{MANIFEST}", manifest)

    def abandon(self) -> None:
        if self._committing:  # the answer to a put may get lost, and the put be done
            with contextlib.suppress(Exception):
                self._fs.rm_file(f"{self._folder}/{MANIFEST}")
        with contextlib.suppress(Exception):
            self._fs.rm(f"{self._folder}/{self.prefix}", recursive=True)

    def _path(self, file: str) -> str:
        return f"{self._folder}/{self.prefix}{file}"


class _ObjectSink(Sink):
    def __init__(self, file: Any, path: str) -> None:
        self._file = file
        self._path = path

    def write(self, offset: int, data: memoryview) -> None:
        assert offset == self._file.tell(), "an object is written from its start to its end"
        with _told(self._path):
            self._file.write(data)

    def finish(self) -> None:
        with _told(self._path):
            self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.forced = True  # or fsspec uploads the rest when it closes the file
            self._file.close()


class _ObjectSource(Source):
    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path

    def read(self, offset: int, into: memoryview) -> int:
        with _told(self._path):
            data = self._fs.cat_file(self._path, start=offset, end=offset + len(into))
        into[: len(data)] = data
        return len(data)

    def close(self) -> None:
        pass


@contextlib.contextmanager
def _told(where: str) -> Iterator[None]:
    """Whatever a library raises as an OSError that names the place.

    A server's answer is never EIO, which is for a broken disk: another try may succeed.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        number = None if error.errno == errno.EIO else error.errno
        raise OSError(number, error.strerror or str(error), error.filename or where) from error
    except Exception as error:
        raise OSError(None, f"{type(error).__name__}: {error}", where) from error
