"""Signals that ask the run to end become an exception, so that ranks are stopped and journalled.

Interrupted     raised here, by a signal or by `StopRequest.end`; a rank's exit code is then 75
CommandStopped  made of Interrupted by `stoppable`; exit code 128 plus the signal's number
RunStopped      made of Interrupted by `launch/job.py` once the end is recorded, and on further
                nodes by `launch/nodes.py`; of CommandStopped by `launch/start.py`; exit code 75
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

from pipeline.errors import CommandStopped

ENDING = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT,
    signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip
"""Signals that end a process by default and that people and batch systems send to ask for it."""
SHOW_CURSOR = "\x1b[?25h"
"""Undoes what a display at the terminal's bottom has hidden."""
Handler = Callable[[int, FrameType | None], None]


class Interrupted(BaseException):
    """A signal asked this process, or another rank, to end. No `except Exception` swallows it."""

    def __init__(self, number: int | None = None, *, cause: str = "") -> None:
        self.number = signal.SIGTERM if number is None else signal.Signals(number)
        """The signal; SIGTERM if another process got it."""
        self.cause = cause if number is None else self.number.name
        """Which signal it was, and where; empty if another process got it and has not said."""
        super().__init__(self.cause or "a signal to one of the ranks")


@contextlib.contextmanager
def stoppable(*, force_after: float | None = 10.0) -> Iterator[None]:
    """Leave the body at an ending signal as at an exception, so that its folders are removed and
    its processes ended; then raise CommandStopped. See `interruptible` for `force_after`."""
    with interruptible(force_after=force_after):
        try:
            yield
        except Interrupted as interrupted:
            number = interrupted.number
            raise CommandStopped(number, f"stopped by {number.name}") from None


@contextlib.contextmanager
def interruptible(*, force_after: float | None) -> Iterator[None]:
    """Raise Interrupted in the main thread on the first ending signal.

    After it the others are ignored while the run is wound up, and a second Ctrl-C ends the process
    at once. The process ends `force_after` seconds after the first in any case, if given, as the
    main thread may be in a native call that never returns.
    """
    with _handled(_raise), _forced_end(force_after):
        yield


def default_signals() -> None:
    """End at once on an ending signal, even inside a native call that would keep Python from it."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Keep ending signals from processes that the body starts until they call `ignore_signals`.
    Signals to this thread arrive after the body."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Ignore ending signals, blocked ones too."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


@contextlib.contextmanager
def _handled(handler: Handler) -> Iterator[None]:
    """Have `handler` get the ending signals in the body, but for signals that are ignored (nohup).
    Without effect in another thread than the main one, which has no signals."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in ENDING if main}
    for number, former in before.items():
        if former is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@dataclass(eq=False)
class StopRequest:
    """Request by a signal that this process ends."""

    _number: int | None = field(default=None, init=False)

    @property
    def asked(self) -> bool:
        """Whether a signal has asked for the end while that was deferred."""
        return self._number is not None

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Only take note of ending signals in the body, so that it can bring its work to an end; it
        should look at `asked` now and then. Raises Interrupted after the body if one came. A second
        Ctrl-C ends the process at once."""

        def note(number: int, frame: FrameType | None) -> None:
            self._number = number
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.SIG_DFL)

        with _handled(note):
            yield
            if self._number is not None and threading.current_thread() is threading.main_thread():
                raise Interrupted(self._number)

    def end(self) -> NoReturn:
        """Raise Interrupted: all ranks have agreed to stop, whichever was asked."""
        raise Interrupted(self._number)


def at_second_interrupt(words: str) -> None:
    """Print these words when a second Ctrl-C ends the process, in the body of `interruptible`."""

    def end(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # a closed terminal
            os.write(2, (f"\n{SHOW_CURSOR}" if os.isatty(2) else "").encode() + words.encode())
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, end)


@contextlib.contextmanager
def _forced_end(seconds: float | None) -> Iterator[None]:
    """Python's low-level handler writes a signal's number to a pipe, whatever the main thread does;
    another thread reads it there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    over = threading.Event()

    def watch() -> None:
        # A stage may have a handler for a signal, which then does not ask this process to end.
        ours, number = (_raise, _pass_over, signal.SIG_DFL, signal.SIG_IGN), os.read(reader, 1)
        while number and not (number[0] in ENDING and signal.getsignal(number[0]) in ours):
            number = os.read(reader, 1)
        if number and not over.wait(seconds):
            os._exit(128 + number[0])

    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="pipe-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        over.set()
        os.close(writer)
        thread.join()
        os.close(reader)


def _raise(number: int, frame: FrameType | None) -> None:
    for other in ENDING:
        if signal.getsignal(other) is _raise:
            signal.signal(other, _pass_over)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise Interrupted(number)


def _pass_over(number: int, frame: FrameType | None) -> None:
    """Ignore a signal while an earlier one is winding up the process; ignored signals would stay so
    in the processes that it starts."""


def _in_forked_child() -> None:
    """End by a signal at once, without waking the parent's thread through the shared pipe."""
    ours = [number for number in ENDING if signal.getsignal(number) in (_raise, _pass_over)]
    for number in ours:
        signal.signal(number, signal.SIG_DFL)
    if ours:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_in_forked_child)
