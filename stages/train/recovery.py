"""What becomes of a training after an anomalous step: it stops, skips it, or goes back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from pipeline.contracts.training import Checkpoints, Progress
from pipeline.errors import StageError
from stages.train.anomalies import SPIKE, AnomalyMonitor, leave_out
from stages.train.policies import Anomalies
from stages.train.step import StepResult

HINT = (
    "lower the learning rate, or look for broken samples; the last checkpoint is from before this "
    "step. anomalies in this slot can skip such steps"
)


class Recovery:
    """Does what the recipe says about anomalous steps; `validate` is what a restore asks."""

    def __init__(
        self, policy: Anomalies, checkpoints: Checkpoints, validate: Callable[[Progress], None]
    ) -> None:
        self._policy = policy
        self._checkpoints = checkpoints
        self._admit = validate

    def recover(
        self,
        anomaly: str,
        done: StepResult,
        watch: AnomalyMonitor,
        progress: Progress,
        samples: int,
    ) -> dict[str, Any]:
        """Move `progress` behind the next `samples` samples, of which no update came (collective).
        Returns what is to be told of it. Raises StageError when the run has to stop."""
        start, stop = progress.samples, progress.samples + samples
        what = self._described(anomaly, done, watch, progress, stop)
        action = watch.action(anomaly)
        if action == "stop":
            raise StageError(what, hint=HINT)
        facts = {
            "anomaly": anomaly,
            "action": action,
            "anomalous_step": progress.step + 1,
            "anomalous_loss": watch.loss,
            "grad_norm": done.report.grad_norm,
        }
        if action == "skip":
            self._skip(what, progress, stop)
        else:
            start = self._roll_back(what, progress, stop)
        leave_out(progress, start, stop)
        return {**facts, "samples_from": start, "samples_to": stop}

    def _described(
        self, anomaly: str, done: StepResult, watch: AnomalyMonitor, progress: Progress, stop: int
    ) -> str:
        step = f"step {progress.step + 1}"
        where = f"(samples {progress.samples} to {stop - 1} of the order)"
        if anomaly != SPIKE:
            return f"{step}: the gradient norm is {done.report.grad_norm} {where}"
        window = progress.recent_losses[-self._policy.spike_window :]
        mean = sum(window) / len(window)
        return (
            f"{step}: the loss is {watch.loss:.4f}, a spike over the mean {mean:.4f} of the last "
            f"{len(window)} steps {where}"
        )

    def _skip(self, what: str, progress: Progress, stop: int) -> None:
        progress.left_out_in_a_row += 1
        if progress.left_out_in_a_row > self._policy.max_skips:
            raise StageError(
                f"{what}, after {self._policy.max_skips} steps in a row were skipped (max_skips)",
                hint=HINT,
            )
        progress.samples = stop

    def _roll_back(self, what: str, progress: Progress, stop: int) -> int:
        """Go back to the newest checkpoint; the position of its next sample."""
        if progress.rollbacks >= self._policy.max_rollbacks:
            raise StageError(
                f"{what}, after {progress.rollbacks} rollbacks (max_rollbacks)", hint=HINT
            )
        before = copy.copy(progress)
        restored = self._checkpoints.restore(self._admit)
        if restored is None:
            raise StageError(f"{what}, and there is no checkpoint to go back to")
        vars(progress).update(
            {
                **vars(restored),
                "samples": stop,
                "lineage": before.lineage,
                "left_out": before.left_out,
                "rollbacks": before.rollbacks + 1,
            }
        )
        return restored.samples
