"""Chat templates rendered within bounds of time and memory.

A template is a program that comes with a model. transformers runs it in Jinja's sandbox, which lets
it touch nothing, but continue for ever and ask for any amount of memory. So it runs in another
process, forked at the first use, whose limits the system enforces; one that breaks them is killed,
and the next call starts another."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import resource
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jinja2

from pipeline.utils import die_with

SECONDS = 10
"""Most seconds of a processor that a call takes. A long conversation takes some milliseconds, and
a call renders parts of up to 64 of them; where that is too much, each is rendered by itself."""
MEMORY = 1 << 30
"""Most bytes that a call adds to the memory of this process."""
ANSWER = 1 << 28
"""Most bytes of what a call returns."""
WAIT = 600.0
"""Seconds after which a process that does not even compute is taken for dead."""


class TemplateLimitError(Exception):
    """A template took more than it may."""


class Limited:
    """A function of plain values that runs in another process. What it returns comes as JSON has
    it; an error of it is raised as one of Jinja's or a RuntimeError.

    Copies in forked processes start processes for themselves.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        """`name` says whose templates the function renders."""
        self._function, self._name = function, name
        self._guard = threading.RLock()
        self._owner = self._child = 0
        self._pipe: Connection | None = None

    def start(self) -> Connection:
        """Start the process, if it is not there, now instead of at the first call."""
        with self._guard:
            if self._pipe is not None:
                return self._pipe
            self._pipe, theirs = multiprocessing.Pipe()
            parent = os.getpid()
            child = os.fork()
            if child == 0:
                try:
                    die_with(parent)
                    _serve(self._function, theirs)
                finally:
                    os._exit(0)
            theirs.close()
            self._owner, self._child = parent, child
            return self._pipe

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. Raises TemplateLimitError, and what the function raises."""
        if self._owner not in (0, os.getpid()):  # a copy, whose lock another thread may have held
            self._end()
            self._guard = threading.RLock()
        limit = f"{SECONDS} s of a processor or {MEMORY >> 30} GiB of memory"
        answer: dict[str, Any] = {"limit": limit}
        with self._guard:
            pipe = self.start()
            try:
                pipe.send_bytes(pickle.dumps((args, kwargs)))
                if not pipe.poll(WAIT):
                    raise EOFError
                answer = json.loads(pipe.recv_bytes())
            except (OSError, EOFError):  # it was killed, or is taken for dead
                self._end()
        if "failed" in answer:
            name, text = answer["failed"]
            kind = getattr(jinja2, name, RuntimeError)
            known = isinstance(kind, type) and issubclass(kind, jinja2.TemplateError)
            raise (jinja2.TemplateError if known else RuntimeError)(text)
        if "limit" in answer:
            message = f"rendering by the template of {self._name} takes over {answer['limit']}"
            raise TemplateLimitError(message)
        return answer["returned"]

    def _end(self) -> None:
        """End the process, if it is ours. The pipe closes itself, as it may have done already where
        both are garbage at once."""
        if self._owner == os.getpid():
            with contextlib.suppress(OSError):
                os.kill(self._child, signal.SIGKILL)
                os.waitpid(self._child, 0)
        self._owner, self._pipe = 0, None

    __del__ = _end


def _serve(function: Callable[..., Any], pipe: Connection) -> None:
    """Answer until the other end is closed, in the child."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are the parent's
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - locks, sockets, GPUs
        if int(name) not in (0, 1, 2, pipe.fileno()):
            with contextlib.suppress(OSError):
                os.close(int(name))
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send_bytes(_answer(function, pipe.recv_bytes()))


def _answer(function: Callable[..., Any], request: bytes) -> bytes:
    args, kwargs = pickle.loads(request)  # noqa: S301 - the parent's own
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    try:
        value = function(*args, **kwargs)
        plain = dict(value) if hasattr(value, "keys") else value  # a mapping of transformers
        content = json.dumps({"returned": plain}).encode()
        if len(content) <= ANSWER:
            return content
        return json.dumps({"limit": f"{ANSWER >> 20} MiB of text"}).encode()
    except MemoryError:
        return json.dumps({"limit": f"{MEMORY >> 30} GiB of memory"}).encode()
    except Exception as error:
        return json.dumps({"failed": [type(error).__name__, str(error)[:10_000]]}).encode()
