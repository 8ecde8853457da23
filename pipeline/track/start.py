"""Start the process that feeds a tracker, and end it with the run."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.contracts.stage import Context
from pipeline.distributed.signals import Interrupted, signals_blocked
from pipeline.errors import in_words
from pipeline.execution import failures
from pipeline.execution.run_spec import current
from pipeline.track.contract import Outcome
from pipeline.utils.processes import GRACE, kill_sessions, start_child

FAILED_SECONDS = 1.0
"""Seconds that a failed rank 0 listens for a feeder's last words. The feeder's own time is left to
it: other ranks, and the next attempt, would wait as well."""
SLACK_SECONDS = 2.0
"""Seconds after which a feeder is killed that should have ended by itself."""


_running: list[RunningFeeder] = []
"""The feeders of this process, which learn together that the run has ended."""


Unsent = Callable[[Path], str]
"""Returns the command that sends what a tracker keeps on disk of the run in a folder, if any."""


def start_feeder(ctx: Context, timeout: float, unsent: Unsent) -> None:
    """Start the feeder of this slot's tracker on rank 0; it is notified when the run ends, and gets
    `timeout` seconds then. A failure to start it is a warning."""
    if not ctx.dist.is_main:
        return
    message = {"spec": current().dump(), "slot": ctx.slot, "seconds": timeout}
    try:
        with signals_blocked():  # it ignores ending signals, but not before Python has started
            process = start_child(
                "pipeline.track.process",
                message,
                str(ctx.run_dir),
                f"{GRACE}{timeout + SLACK_SECONDS}",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # launchers kill a failed rank's group
            )
    except OSError as error:
        ctx.log.warning("%s: the tracker cannot be started: %s", ctx.slot, in_words(error))
        return
    _running.append(RunningFeeder(ctx, ctx.slot, process, timeout, unsent))
    ctx.on_exit(_running[-1].end)


@dataclass(eq=False)
class RunningFeeder:
    """A feeder at work."""

    ctx: Context
    slot: str
    process: subprocess.Popen[bytes]
    timeout: float
    unsent: Unsent
    _told: float = field(default=0.0, init=False)
    """When it was notified of the end; 0 before."""

    def __post_init__(self) -> None:
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def end(self) -> None:
        """Tell all feeders how the run has ended, and wait until this one has sent everything."""
        outcome = _outcome(self.ctx.run_dir)
        for one in _running:
            one.tell(outcome)
        _running.remove(self)
        if outcome == "failed":
            self._listener.join(min(self.timeout, FAILED_SECONDS))
            if self._listener.is_alive():
                self._warn(f"the rest is being sent, for at most {self.timeout:g} s")
            return
        latest = self._told + self.timeout + SLACK_SECONDS
        self._listener.join(max(0.0, latest - time.monotonic()))
        kill_sessions([self.process])  # what the tracker has started, too
        self._listener.join(SLACK_SECONDS)

    def tell(self, outcome: Outcome) -> None:
        """Notify the feeder how the run has ended, if that has not happened: from then on it has
        its seconds."""
        if self._told:
            return
        self._told = time.monotonic()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError), self.process.stdin as stdin:  # it may have ended
            stdin.write(outcome.encode())

    def _listen(self) -> None:
        """Log what the feeder says, and how it ends if it does not say that."""
        assert self.process.stdout is not None
        silent = True
        with self.process.stdout as lines:
            for line in lines:
                silent = False
                self._warn(line.decode(errors="replace").rstrip())
        code = self.process.wait()
        rest = f"the rest is sent by {' and '.join(f'`{one}`' for one in self._commands())}"
        if code == -signal.SIGALRM:
            self._warn(f"not everything was sent in {self.timeout:g} s; {rest}")
        elif code < 0 or (code and silent):
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            self._warn(f"tracking has ended ({how}); {rest}")

    def _commands(self) -> Iterator[str]:
        yield f"pipe track {shlex.quote(str(self.ctx.run_dir))}"
        with contextlib.suppress(Exception):  # the stage's author wrote it
            if command := self.unsent(self.ctx.run_dir):
                yield command

    def _warn(self, what: str) -> None:
        self.ctx.log.warning("%s: %s", self.slot, what)


def _outcome(run_dir: Path) -> Outcome:
    """Return how the run ends that is being left. A launcher stops rank 0 when another one fails,
    which has reported that."""
    error = sys.exception()
    if error is None:
        return "finished"
    if not isinstance(error, Interrupted | SystemExit):
        return "failed"
    with contextlib.suppress(OSError):
        return "stopped" if failures.first_rank(run_dir) is None else "failed"
    return "stopped"
