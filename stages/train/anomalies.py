"""Detection of anomalous steps, and recovery from them. All ranks decide from equal numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipeline import Progress, StageError, StepGuard, StepReport
from stages.train.settings import Anomalies

NON_FINITE, SPIKE = "non-finite gradient", "loss spike"
HINT = (
    "lower the learning rate, or look for broken samples; the last checkpoint is from before this "
    "step. anomalies in this slot can skip such steps"
)


@dataclass(eq=False)
class AnomalyMonitor:
    """Observes the steps of one training. After an anomalous one it stops the run, skips the batch,
    or goes back to a checkpoint, as the policy says."""

    policy: Anomalies
    total: Callable[[Tensor], Tensor]
    """The engine's sum over ranks."""
    restore: Callable[[], Progress | None] = lambda: None
    """Restores the newest checkpoint, if there is one (collective)."""
    loss: float | None = None
    """Mean loss of the observed step; None if the policy does not look for spikes."""
    _spikes: bool = False

    def observe(self, part: Tensor, progress: Progress) -> None:
        """Take this rank's part of a step's mean loss before its update (collective)."""
        if self.policy.spike is not None:
            self.loss = float(self.total(part.detach().clone()))
            self._spikes = is_spike(self.loss, progress.recent_losses, self.policy)

    @property
    def guard(self) -> StepGuard | None:
        """Guard for the engine's update; None if it would always allow it."""
        if self.policy.spike is None and self.policy.non_finite == "stop":
            return None
        return lambda norm: math.isfinite(norm) and not self._spikes

    def anomaly(self, report: StepReport) -> str:
        """What is anomalous about the observed step, or empty; waits for the gradient norm."""
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
            progress.recent_losses = window[-self.policy.spike_window :]

    def require_finite(self, report: StepReport, before: Progress, after: Progress) -> None:
        """Raise StageError if the gradient of an unguarded step from `before` to `after` is not
        finite. Its update may have been applied; nothing of it is saved."""
        if self.guard is None and self.anomaly(report):
            norm = float(report.grad_norm)
            what = self._describe(NON_FINITE, norm, before, after.samples)
            raise StageError(what, hint=HINT)

    def recover(
        self, anomaly: str, grad_norm: float, progress: Progress, samples: int
    ) -> dict[str, Any]:
        """Advance `progress` past an anomalous batch of `samples` samples (collective). Returns
        facts to report. Raises StageError if the run has to stop."""
        policy, start, stop = self.policy, progress.samples, progress.samples + samples
        what = self._describe(anomaly, grad_norm, progress, stop)
        action = policy.spike if anomaly == SPIKE else policy.non_finite
        facts = {
            "anomaly": anomaly,
            "action": action,
            "anomalous_step": progress.step + 1,
            "anomalous_loss": self.loss,
            "grad_norm": grad_norm,
        }
        if action == "stop":
            raise StageError(what, hint=HINT)
        if action == "skip":
            progress.left_out_in_a_row += 1
            if progress.left_out_in_a_row > policy.max_skips:
                limit = f"{policy.max_skips} steps in a row were skipped (max_skips)"
                raise StageError(f"{what}, after {limit}", hint=HINT)
            progress.samples = stop
        else:
            if progress.rollbacks >= policy.max_rollbacks:
                limit = f"{progress.rollbacks} rollbacks (max_rollbacks)"
                raise StageError(f"{what}, after {limit}", hint=HINT)
            restored = self.restore()
            if restored is None:
                raise StageError(f"{what}, and there is no checkpoint to go back to")
            overrides: dict[str, Any] = {"samples": stop, "rollbacks": progress.rollbacks + 1}
            overrides |= {"lineage": progress.lineage, "left_out": progress.left_out}
            vars(progress).update(vars(restored) | overrides)
            start = restored.samples
        exclude(progress, start, stop)
        return {**facts, "samples_from": start, "samples_to": stop}

    def _describe(self, anomaly: str, grad_norm: float, progress: Progress, stop: int) -> str:
        if anomaly == SPIKE:
            mean = statistics.fmean(progress.recent_losses[-self.policy.spike_window :])
            found = f"the loss is {self.loss:.4f}, a spike over the mean {mean:.4f}"
        else:
            found = f"the gradient norm is {grad_norm}"
        samples = f"samples {progress.samples} to {stop - 1} of the order"
        return f"step {progress.step + 1}: {found} ({samples})"


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
