"""A tracker, the stage that names one, and the process that feeds it: started with the stage, ended
with the run."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from pipeline.contracts.plan_view import PlanView
from pipeline.contracts.stage import Context
from pipeline.distributed.signals import Interrupted, signals_blocked
from pipeline.errors import Problem, in_words
from pipeline.execution import failures
from pipeline.utils.processes import GRACE, kill_sessions, start_child

Outcome = Literal["finished", "failed", "stopped"]
FAILED_SECONDS = 1.0
"""Seconds that a failed rank 0 listens for a feeder's last words. The feeder's own time is left to
it: other ranks, and the next attempt, would wait as well."""
SLACK_SECONDS = 2.0
"""Seconds after which a feeder is killed that should have ended by itself."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The run that is tracked."""

    name: str
    """Name of its folder."""
    recipe: Mapping[str, Any]
    """The merged recipe as JSON, without the values of environment variables."""
    environment: Mapping[str, Any]
    """Packages and machine, as in `environment.json`."""
    folder: Path


class Tracker(ABC):
    """A run in another program. Its methods are called one after another, in a separate process; an
    exception ends the tracking, and nothing else. Steps that a resumed run repeats are not sent
    again: an undisturbed resume repeats their numbers too. Steps after a rollback are sent again,
    with their other numbers. Whatever `log` has taken counts as sent."""

    @abstractmethod
    def open(self, run: RunFacts, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begin, or continue in the run that an earlier call began. `state` is what that call
        returned, as JSON; empty the first time."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Log measurements of a step; `time` is in seconds since 1970. Names of a further training
        of the run begin with its slot (`chat/loss`), and its steps begin with 1 again."""

    def log_text(self, step: int, name: str, text: str) -> None:
        """Log a text that was generated at a step. Does nothing unless overridden."""

    @abstractmethod
    def close(self, outcome: Outcome) -> None:
        """Send everything that is left; the run has ended for now."""


@dataclass(frozen=True, kw_only=True)
class TrackerStage(ABC):
    """Base of stages that send a run's measurements to another program, from a process next to rank
    0."""

    nothing_to_plan: ClassVar[bool] = True
    package: ClassVar[str] = ""
    """Module that must be installed; empty if none has."""
    extra: ClassVar[str] = ""
    """Extra of this distribution that installs it."""

    every: Annotated[int, Ge(1)] = 1
    """Send the measurements of every so many steps; evaluations are always sent."""

    timeout: Annotated[float, Gt(0)] = 30.0
    """Seconds that are left to send everything, however the run ends; `pipe run` waits for that."""

    def unsent(self, folder: Path) -> str:
        """The command that sends what the tracker has taken and not sent, if it keeps that on disk;
        an empty text if there is none. `folder` is the run's."""
        return ""

    @abstractmethod
    def tracker(self) -> Tracker:
        """The tracker that these fields describe."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        if self.package and find_spec(self.package) is None:
            hint = f"pip install 'pipetrain[{self.extra}]'" if self.extra else ""
            yield Problem(key="use", message=f"{self.package} is not installed", hint=hint)

    def run(self, ctx: Context) -> None:
        """Start the feeder of this slot's tracker on rank 0; it is notified when the run ends, and
        gets `timeout` seconds then. A failure to start it is a warning."""
        if not ctx.dist.is_main:
            return
        message = {"spec": ctx.spec, "slot": ctx.slot, "seconds": self.timeout}
        try:
            with signals_blocked():  # it ignores ending signals, but not before Python has started
                process = start_child(
                    "pipeline.track.feeder",
                    message,
                    str(ctx.run_dir),
                    f"{GRACE}{self.timeout + SLACK_SECONDS}",
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # launchers kill a failed rank's group
                )
        except OSError as error:
            ctx.log.warning("%s: the tracker cannot be started: %s", ctx.slot, in_words(error))
            return
        _running.append(RunningFeeder(ctx, self, process))
        ctx.on_exit(_running[-1].end)


@dataclass(eq=False)
class RunningFeeder:
    """A feeder at work."""

    ctx: Context
    stage: TrackerStage
    process: subprocess.Popen[bytes]
    _notified: float = field(default=0.0, init=False)
    """When it was notified of the end; 0 before."""

    def __post_init__(self) -> None:
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def end(self) -> None:
        """Notify all feeders how the run has ended, and wait until this one has sent everything."""
        error, outcome = sys.exception(), "finished"
        if error is not None:
            outcome = "stopped" if isinstance(error, Interrupted | SystemExit) else "failed"
        if outcome == "stopped":  # a launcher stops rank 0, too, when another rank has failed
            with contextlib.suppress(OSError):
                outcome = "failed" if failures.first_rank(self.ctx.run_dir) is not None else outcome
        for one in _running:
            if not one._notified:  # from the first notice on it has its seconds
                one._notified = time.monotonic()
                assert one.process.stdin is not None
                with contextlib.suppress(OSError), one.process.stdin as stdin:  # it may have ended
                    stdin.write(outcome.encode())
        _running.remove(self)
        if outcome == "failed":
            self._listener.join(min(self.stage.timeout, FAILED_SECONDS))
            if self._listener.is_alive():
                self._warn(f"the rest is being sent, for at most {self.stage.timeout:g} s")
            return
        latest = self._notified + self.stage.timeout + SLACK_SECONDS
        self._listener.join(max(0.0, latest - time.monotonic()))
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
        code, how = self.process.wait(), ""
        if code == -signal.SIGALRM:
            how = f"not everything was sent in {self.stage.timeout:g} s"
        elif code < 0 or (code and silent):
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            how = f"tracking has ended ({name})"
        commands = [f"`pipe track {shlex.quote(str(self.ctx.run_dir))}`"]
        with contextlib.suppress(Exception):  # the stage's author wrote it
            if own := self.stage.unsent(self.ctx.run_dir):
                commands.append(f"`{own}`")
        if how:
            self._warn(f"{how}; the rest is sent by {' and '.join(commands)}")

    def _warn(self, what: str) -> None:
        self.ctx.log.warning("%s: %s", self.ctx.slot, what)


_running: list[RunningFeeder] = []
"""The feeders of this process, which learn together that the run has ended."""
