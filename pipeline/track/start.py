"""Start the process that feeds a tracker, and end it with the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass

from pipeline.contracts.stage import Context
from pipeline.distributed.signals import Interrupted, held_back
from pipeline.errors import in_words
from pipeline.track.contract import Outcome
from pipeline.utils.process_tree import GRACE, kill_sessions, own_module

FAILED_SECONDS = 1.0
"""Seconds that a failed rank 0 listens for a feeder's last words. The feeder's own time is left to
it: other ranks, and the next attempt, would wait as well."""
SLACK_SECONDS = 2.0
"""Seconds after which a feeder is killed that should have ended by itself."""


def start_feeder(ctx: Context, timeout: float) -> None:
    """Start the feeder of this slot's tracker on rank 0; it is told when the run ends, and gets
    `timeout` seconds then. A failure to start it is a warning."""
    if not ctx.dist.is_main:
        return
    command = own_module("pipeline.track.process", str(ctx.run_dir), ctx.slot, str(timeout))
    try:
        with held_back():  # it ignores ending signals, but not before Python has started
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {GRACE: str(timeout + SLACK_SECONDS)},
                start_new_session=True,  # launchers kill a failed rank's group
            )
    except OSError as error:
        ctx.log.warning("%s: the tracker cannot be started: %s", ctx.slot, in_words(error))
        return
    ctx.on_exit(RunningFeeder(ctx, ctx.slot, process, timeout).end)


@dataclass(eq=False)
class RunningFeeder:
    """A feeder at work."""

    ctx: Context
    slot: str
    process: subprocess.Popen[bytes]
    timeout: float

    def __post_init__(self) -> None:
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def end(self) -> None:
        """Tell the feeder how the run has ended, and wait until it has sent everything."""
        outcome = _outcome()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError), self.process.stdin as stdin:  # it may have ended
            stdin.write(outcome.encode())
        if outcome == "failed":
            self._listener.join(min(self.timeout, FAILED_SECONDS))
            if self._listener.is_alive():
                self._warn(f"the rest is being sent, for at most {self.timeout:g} s")
            return
        self._listener.join(self.timeout + SLACK_SECONDS)
        kill_sessions([self.process])  # what the tracker has started, too
        self._listener.join(SLACK_SECONDS)

    def _listen(self) -> None:
        """Log what the feeder says, and how it ends if it does not say that."""
        assert self.process.stdout is not None
        silent = True
        with self.process.stdout as lines:
            for line in lines:
                silent = False
                self._warn(line.decode(errors="replace").rstrip())
        code = self.process.wait()
        rest = f"`pipe track {self.ctx.run_dir}` sends the rest"
        if code == -signal.SIGALRM:
            self._warn(f"not everything was sent in {self.timeout:g} s; {rest}")
        elif code < 0 or (code and silent):
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            self._warn(f"the process that feeds the tracker has ended ({how}); {rest}")

    def _warn(self, what: str) -> None:
        self.ctx.log.warning("%s: %s", self.slot, what)


def _outcome() -> Outcome:
    """Return how the run ends that is being left."""
    error = sys.exception()
    if error is None:
        return "finished"
    return "stopped" if isinstance(error, Interrupted | SystemExit) else "failed"
