"""Detection of anomalous steps, and recovery from them. All ranks decide from equal numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipeline import Checkpoints, Progress, StageError, StepGuard, StepReport
from stages.train.settings import Anomalies

NON_FINITE, SPIKE = "non-finite gradient", "loss spike"
HINT = (
    "lower the learning rate, or look for broken samples; the last checkpoint is from before this "
    "step. anomalies in this slot can skip such steps"
)


class AnomalyMonitor:
    """Observes the steps of one training."""

    def __init__(self, policy: Anomalies, total: Callable[[Tensor], Tensor]) -> None:
        """`total` is the engine's sum over ranks."""
        self._policy = policy
        self._total = total
        self._spikes = False
        self.loss: float | None = None
        """Mean loss of the observed step; None if the policy does not look for spikes."""

    def observe(self, part: Tensor, progress: Progress) -> None:
        """Take this rank's part of a step's mean loss before its update (collective)."""
        self._spikes, self.loss = False, None
        if self._policy.spike is not None:
            self.loss = float(self._total(part.detach().clone()))
            self._spikes = is_spike(self.loss, progress.recent_losses, self._policy)

    @property
    def should_step(self) -> StepGuard | None:
        """Guard for the engine's update; None if it would always allow it."""
        if self._policy.spike is None and self._policy.non_finite == "stop":
            return None
        return lambda norm: math.isfinite(norm) and not self._spikes

    def anomaly(self, report: StepReport) -> str:
        """Description of the observed step's anomaly; empty if there is none. Waits for the
        gradient norm."""
        # An overflow under loss scaling goes away as the scale falls; without a scale it stays.
        if not math.isfinite(float(report.grad_norm)) and (
            report.applied or report.loss_scale <= 1.0
        ):
            return NON_FINITE
        return SPIKE if self._spikes else ""

    def record(self, progress: Progress, *, applied: bool) -> None:
        """Record a step without anomaly; only losses of applied updates enter the window."""
        progress.left_out_in_a_row = 0
        if applied and self.loss is not None and math.isfinite(self.loss):
            window = [*progress.recent_losses, self.loss]
            progress.recent_losses = window[-self._policy.spike_window :]


def is_spike(loss: float, recent: list[float], policy: Anomalies) -> bool:
    """Whether `loss` is above the policy's limit, given a full window of `recent` losses."""
    window = recent[-policy.spike_window :]
    full = len(window) == policy.spike_window
    return full and loss > statistics.fmean(window) * policy.spike_factor


def exclude(progress: Progress, start: int, stop: int) -> None:
    """Record that positions [start, stop) have no update; adjoining ranges are merged."""
    joined: list[list[int]] = []
    for low, high in sorted([*progress.left_out, [start, stop]]):
        if joined and low <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], high)
        else:
            joined.append([low, high])
    progress.left_out = joined


@dataclass(frozen=True)
class Recovery:
    """Stops the run, skips a batch, or goes back to a checkpoint, as the policy says."""

    policy: Anomalies
    monitor: AnomalyMonitor
    checkpoints: Checkpoints
    validate: Callable[[Progress], None]
    """Passed to `Checkpoints.restore`."""

    @property
    def guards(self) -> bool:
        """Whether a step may be left out."""
        return self.monitor.should_step is not None

    def recover(
        self, anomaly: str, grad_norm: float, progress: Progress, samples: int
    ) -> dict[str, Any]:
        """Advance `progress` past an anomalous batch of `samples` samples (collective). Returns
        facts to report. Raises StageError if the run has to stop."""
        start, stop = progress.samples, progress.samples + samples
        what = self._describe(anomaly, grad_norm, progress, stop)
        action = self.policy.spike if anomaly == SPIKE else self.policy.non_finite
        if action == "stop":
            raise StageError(what, hint=HINT)
        facts = {
            "anomaly": anomaly,
            "action": action,
            "anomalous_step": progress.step + 1,
            "anomalous_loss": self.monitor.loss,
            "grad_norm": grad_norm,
        }
        if action == "skip":
            self._skip(what, progress, stop)
        else:
            start = self._roll_back(what, progress, stop)
        exclude(progress, start, stop)
        return {**facts, "samples_from": start, "samples_to": stop}

    def require_finite(self, report: StepReport, before: Progress, after: Progress) -> None:
        """Raise StageError if the gradient of an unguarded step from `before` to `after` is not
        finite. Its update has been applied."""
        if not self.guards and self.monitor.anomaly(report):
            norm = float(report.grad_norm)
            what = self._describe(NON_FINITE, norm, before, after.samples)
            raise StageError(what, hint=HINT)

    def _describe(self, anomaly: str, grad_norm: float, progress: Progress, stop: int) -> str:
        if anomaly == SPIKE:
            mean = statistics.fmean(progress.recent_losses[-self.policy.spike_window :])
            found = f"the loss is {self.monitor.loss:.4f}, a spike over the mean {mean:.4f}"
        else:
            found = f"the gradient norm is {grad_norm}"
        samples = f"samples {progress.samples} to {stop - 1} of the order"
        return f"step {progress.step + 1}: {found} ({samples})"

    def _skip(self, what: str, progress: Progress, stop: int) -> None:
        progress.left_out_in_a_row += 1
        if progress.left_out_in_a_row > self.policy.max_skips:
            raise StageError(
                f"{what}, after {self.policy.max_skips} steps in a row were skipped (max_skips)",
                hint=HINT,
            )
        progress.samples = stop

    def _roll_back(self, what: str, progress: Progress, stop: int) -> int:
        """Restore the newest checkpoint; returns the position of its next sample."""
        if progress.rollbacks >= self.policy.max_rollbacks:
            raise StageError(
                f"{what}, after {progress.rollbacks} rollbacks (max_rollbacks)", hint=HINT
            )
        restored = self.checkpoints.restore(self.validate)
        if restored is None:
            raise StageError(f"{what}, and there is no checkpoint to go back to")
        own = {"samples": stop, "lineage": progress.lineage, "left_out": progress.left_out}
        own["rollbacks"] = progress.rollbacks + 1
        vars(progress).update(vars(restored) | own)
        return restored.samples
