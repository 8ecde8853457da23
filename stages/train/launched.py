"""Steps that were taken, from their launch until their numbers are known and reported."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline import Callbacks, Progress
from stages.train.anomalies import Recovery
from stages.train.evaluation import set_metric
from stages.train.meter import StepMeter, TakenStep
from stages.train.report import Reporter
from stages.train.stragglers import StragglerWatch


@dataclass(kw_only=True, eq=False)
class LaunchedSteps:
    """Reports each step once, in order: to the progress, the callbacks, the watch of the ranks.

    While nothing needs the numbers of a step, they are read after the launch of the next, on which
    the device works meanwhile. That is the same step on every rank, so all decide alike."""

    progress: Progress
    meter: StepMeter
    recovery: Recovery
    reporter: Reporter
    callbacks: Callbacks
    """The reporter among them."""
    stragglers: StragglerWatch
    stop: bool = field(default=False, init=False)
    """Whether any rank was asked to stop, by the steps that were reported."""
    _taken: deque[TakenStep] = field(default_factory=deque, init=False)

    def add(self, taken: TakenStep) -> None:
        """Take a step that was launched."""
        self._taken.append(taken)

    def tell(self, *, but: int = 0) -> None:
        """Wait for the numbers of all steps but the newest `but`, and report them (collective).
        Raises StageError for a step whose gradient is not finite."""
        while len(self._taken) > but:
            taken = self._taken.popleft()
            record = self._record(taken)
            self.callbacks.on_step(taken.progress.step, taken.progress, record)
            seconds, data = record["step_seconds"], taken.result.stats.seconds
            if self.stragglers.look(taken.progress.step, seconds=seconds, data=data):
                self.meter.restart(self.progress)

    @contextlib.contextmanager
    def told_on_failure(self) -> Iterator[None]:
        """Write the records of steps before it if the body raises, as other ranks may not come to
        what is collective. Raises StageError for one whose gradient was not finite, in its place:
        that explains the failure."""
        try:
            yield
        except Exception:
            with contextlib.suppress(RuntimeError):  # a peer or the device is lost
                while self._taken:
                    taken = self._taken.popleft()
                    self.reporter.on_step(taken.progress.step, taken.progress, self._record(taken))
            raise

    def _record(self, taken: TakenStep) -> dict[str, float]:
        """The record of a step, whose loss becomes the progress's."""
        self.recovery.require_finite(taken.result.report, taken.before, taken.progress)
        record = self.meter.record(taken)
        for progress in (self.progress, taken.progress):
            set_metric(progress, "loss", record["loss"])
        self.stop |= taken.peaks()[1]
        return record
