"""Checkpoints in a store without rename, through fsspec: the manifest is written last, in one put,
and is what makes a checkpoint exist.

Every attempt's files have names of their own, so what a dead attempt left is never mixed with what
another wrote.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from pipeline.state.manifest import FILE as MANIFEST
from pipeline.state.store import Attempt, Sink, Source, Store, step_number

_ASIDE = "damaged-" + MANIFEST


class ObjectStore(Store):
    """An fsspec address. Nothing here needs rename, append, or writing at an offset."""

    shared_files = False

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs

        self._address = address.rstrip("/")
        self._fs, root = url_to_fs(address)
        self._root = root.rstrip("/")

    def names(self) -> Sequence[str]:
        return [name for name in self._folders() if self._fs.exists(self._path(name, MANIFEST))]

    def locate(self, name: str, file: str = "") -> str:
        return "/".join(part for part in (self._address, name, file) if part)

    def attempt(self, name: str, identity: str) -> Attempt:
        return _ObjectAttempt(self._fs, f"{self._root}/{name}", identity)

    def size(self, name: str, file: str) -> int | None:
        try:
            size: int = self._fs.size(self._path(name, file))
        except FileNotFoundError:
            return None
        return size

    def get(self, name: str, file: str) -> bytes:
        data: bytes = self._fs.cat_file(self._path(name, file))
        return data

    def open(self, name: str, file: str) -> Source:
        return _ObjectSource(self._fs, self._path(name, file))

    def quarantine(self, name: str) -> str:
        self._fs.pipe_file(self._path(name, _ASIDE), self.get(name, MANIFEST))
        self._fs.rm_file(self._path(name, MANIFEST))
        return self.locate(name, _ASIDE)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name, MANIFEST))
        self._fs.rm(f"{self._root}/{name}", recursive=True)

    def clean(self) -> None:
        for name in self._folders():
            kept = (MANIFEST, _ASIDE)
            if not any(self._fs.exists(self._path(name, file)) for file in kept):
                self._fs.rm(f"{self._root}/{name}", recursive=True)

    def _folders(self) -> list[str]:
        self._fs.invalidate_cache()
        if not self._fs.isdir(self._root):
            return []
        found = [str(path).rstrip("/") for path in self._fs.ls(self._root, detail=False)]
        names = [path.rpartition("/")[2] for path in found]
        return sorted(name for name in names if step_number(name) is not None)

    def _path(self, name: str, file: str) -> str:
        return f"{self._root}/{name}/{file}"


class _ObjectAttempt(Attempt):
    def __init__(self, fs: Any, folder: str, identity: str) -> None:
        self._fs = fs
        self._folder = folder
        self.prefix = f"{identity}/"
        fs.makedirs(f"{folder}/{identity}", exist_ok=True)

    def create(self, file: str, size: int, *, shared: bool) -> Sink:
        assert not shared
        return _ObjectSink(self._fs, self._path(file))

    def put(self, file: str, data: bytes) -> None:
        self._fs.pipe_file(self._path(file), data)

    def get(self, file: str) -> bytes | None:
        try:
            data: bytes = self._fs.cat_file(self._path(file))
        except FileNotFoundError:
            return None
        return data

    def discard(self, file: str) -> None:
        self._fs.rm_file(self._path(file))

    def commit(self, manifest: bytes) -> None:
        self._fs.pipe_file(f"{self._folder}/{MANIFEST}", manifest)

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self._fs.rm(f"{self._folder}/{self.prefix}", recursive=True)

    def _path(self, file: str) -> str:
        return f"{self._folder}/{self.prefix}{file}"


class _ObjectSink(Sink):
    def __init__(self, fs: Any, path: str) -> None:
        self._file = fs.open(path, "wb")

    def write(self, offset: int, data: memoryview) -> None:
        assert offset == self._file.tell(), "an object is written from its start to its end"
        self._file.write(data)

    def finish(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self._file.discard()


class _ObjectSource(Source):
    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path

    def read(self, offset: int, into: memoryview) -> int:
        data = self._fs.cat_file(self._path, start=offset, end=offset + len(into))
        into[: len(data)] = data
        return len(data)

    def close(self) -> None:
        pass
