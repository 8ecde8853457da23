"""Faults at a process's n-th file operation: a kill before, in or after it, or its failure.

Only operations on files under one folder count, so that Python's own do not. Imports nothing heavy:
`sitecustomize.py` of a writer process calls `install_from_environment`.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPERATIONS = (
    "mkdir", "open", "posix_fallocate", "pwrite", "fsync", "close", "rename", "unlink", "rmdir",
)  # fmt: skip
VARIABLE = "TEST_FAULT"


@dataclasses.dataclass(kw_only=True)
class Fault:
    """Place and kind of a fault. `how`: `before`, `half` (of a write; before any other operation)
    or `after` kill; the name of an errno makes the operation fail, and with `lasting` all later
    ones of its kind."""

    root: str
    at: int = -1
    """Number of the operation, from 0; -1 for none."""
    how: str = ""
    only: str = ""
    """Kind of operation that counts; empty for all."""
    lasting: bool = False
    log: str = ""
    """File for the list of operations."""


def install(fault: Fault) -> None:
    """Patch `os` in this process."""
    injector = _Injector(fault)
    for name in OPERATIONS:
        setattr(os, name, injector.wrap(name, getattr(os, name)))


def install_from_environment() -> None:
    """Install the fault that VARIABLE describes, if it is set."""
    if VARIABLE in os.environ:
        install(Fault(**json.loads(os.environ[VARIABLE])))


SITECUSTOMIZE = """\
import sys
if "pipeline.checkpoint.writer" in sys.orig_argv:
    from tests.support.injection import install_from_environment
    install_from_environment()
"""
"""Module for the path of a run; patches its writers only."""


def infect(folder: str, fault: Fault) -> None:
    """Give the fault to every Python process that this process starts, if it is a writer."""
    place = Path(folder, "site")
    place.mkdir(parents=True, exist_ok=True)
    (place / "sitecustomize.py").write_text(SITECUSTOMIZE)
    repository = Path(__file__).parent.parent.parent
    os.environ["PYTHONPATH"] = os.pathsep.join([str(place), str(repository)])
    os.environ[VARIABLE] = json.dumps(dataclasses.asdict(fault))


class _Injector:
    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._files: set[int] = set()
        self._count = 0
        self._failing = ""
        self._log = open(fault.log, "a", buffering=1) if fault.log else None  # noqa: SIM115, PTH123

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def patched(first: Any, *rest: Any, **named: Any) -> Any:
            if not self._concerns(first, named):
                return real(first, *rest, **named)
            if self._fault.only not in ("", name):
                return self._uncounted(name, first, real, rest, named)
            self._begin(name, first, rest, real)
            result = None
            try:
                result = real(first, *rest, **named)
                return result
            finally:  # an operation that finds nothing to do counts too
                self._end(name, first, result)

        return patched

    def _concerns(self, first: Any, named: dict[str, Any]) -> bool:
        if isinstance(first, int):
            return first in self._files
        return named.get("dir_fd") in self._files or os.fspath(first).startswith(self._fault.root)

    def _uncounted(
        self, name: str, first: Any, real: Callable[..., Any], rest: Any, named: Any
    ) -> Any:
        result = real(first, *rest, **named)
        if name == "open":
            self._files.add(result)
        return result

    def _begin(self, name: str, first: Any, rest: tuple[Any, ...], real: Any) -> None:
        fault = self._fault
        here = self._count == fault.at
        if here and fault.how == "half" and name == "pwrite":
            data, offset = rest
            real(first, data[: len(data) // 2], offset)
            _die()
        if here and fault.how in ("before", "half"):
            _die()
        failing = here or (fault.lasting and self._failing == name)
        if failing and hasattr(errno, fault.how):
            self._failing = name
            self._count += 1
            number = getattr(errno, fault.how)
            if name == "close":
                real(first)  # as on Linux
            raise OSError(number, os.strerror(number), *_path(first))

    def _end(self, name: str, first: Any, result: Any) -> None:
        if self._log is not None:
            self._log.write(f"{name} {first}\n")
        if name == "open" and result is not None:
            self._files.add(result)
        elif name == "close":
            self._files.discard(first)
        if self._count == self._fault.at and self._fault.how == "after":
            _die()
        self._count += 1


def _path(first: Any) -> tuple[str, ...]:
    return () if isinstance(first, int) else (os.fspath(first),)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def limit_file_size(fault: Fault) -> None:
    """Limit files of this process to `fault.at` bytes, until `unlimit_file_size`: the nearest thing
    to a full disk that needs no privileges."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (fault.at, resource.RLIM_INFINITY))


def unlimit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
