"""Faults at the requests to an object store, and a writer over HTTP in its own process."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

from fsspec import config, get_filesystem_class

from pipeline.checkpoint import object_store
from pipeline.checkpoint.writer import carry_out
from tests.support.injection import Fault
from tests.support.tiny_store import Tiny, job

REQUESTS = ("makedirs", "open", "pipe_file", "rm", "rm_file")


def install(fault: Fault) -> None:
    """Kill this process `before` or `after` request number `fault.at`."""
    counter = _Counter(fault)
    scheme = fault.root.partition("://")[0]
    places: list[tuple[Any, str]] = [(get_filesystem_class(scheme), name) for name in REQUESTS]
    places += [(object_store, name) for name in ("_write", "_finish")]
    for owner, name in places:
        setattr(owner, name, counter.wrap(name.lstrip("_"), getattr(owner, name)))


class _Counter:
    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._count = 0
        self._inside = False

    def wrap(self, name: str, real: Any) -> Any:
        @functools.wraps(real)
        def patched(owner: Any, *rest: Any, **named: Any) -> Any:
            if self._inside or (name == "open" and "wb" not in rest):  # this is a poll
                return real(owner, *rest, **named)
            self._die_if("before")
            self._inside = True
            try:
                return real(owner, *rest, **named)
            finally:
                self._inside = False
                self._end(f"{name} {rest[0] if rest and isinstance(rest[0], str) else ''}")

        return patched

    def _end(self, line: str) -> None:
        if self._fault.log:
            with open(self._fault.log, "a") as file:  # noqa: PTH123
                file.write(line.strip() + "\n")
        self._die_if("after")
        self._count += 1

    def _die_if(self, how: str) -> None:
        if (self._count, how) == (self._fault.at, self._fault.how):
            os.kill(os.getpid(), signal.SIGKILL)


def write_apart(
    environment: dict[str, str], tiny: Tiny, step: int, identity: str, rank: int,
    fault: Fault | None,
) -> None:  # fmt: skip
    """Write one rank's part of a save, in a process of its own."""
    os.environ.update(environment)
    config.set_conf_env(config.conf)
    if fault is not None:
        install(fault)
    work = job(step, identity)
    assert carry_out(tiny.setups[rank], work, tiny.arena(rank, step)).problem == ""
