"""Whether a step is anomalous. All ranks decide alike, from numbers that are the same on all."""

from __future__ import annotations

import math
import statistics

import torch.distributed
from torch import Tensor

from pipeline.contracts.engine import StepGuard, StepReport
from pipeline.contracts.training import Progress
from stages.train.policies import Action, Anomalies

NON_FINITE, SPIKE = "non-finite gradient", "loss spike"


class AnomalyMonitor:
    """Looks at the steps of one training, one after another."""

    def __init__(self, policy: Anomalies, ranks: int) -> None:
        self._policy = policy
        self._ranks = ranks
        self._spikes = False
        self.loss: float | None = None
        """Of the step that is looked at; None where spikes are not looked for."""

    def look(self, part: Tensor, progress: Progress) -> None:
        """See a step's loss before its update; `part` is this rank's part of the mean, a scalar
        (collective, where spikes are looked for)."""
        self._spikes, self.loss = False, None
        if self._policy.spike is not None:
            total = part.detach().clone()
            if self._ranks > 1:
                torch.distributed.all_reduce(total)
            self.loss = float(total)
            self._spikes = is_spike(self.loss, progress.recent_losses, self._policy)

    @property
    def should_step(self) -> StepGuard | None:
        """What the engine is to ask before the update; None where the answer is always yes."""
        if self._policy.spike is None and self._policy.non_finite == "stop":
            return None
        return lambda norm: math.isfinite(norm) and not self._spikes

    def anomaly(self, report: StepReport) -> str:
        """What was anomalous about the step; empty if nothing."""
        # An overflow under loss scaling is skipped and goes away; without a scale to lower, it
        # stays.
        if not math.isfinite(report.grad_norm) and (report.applied or report.loss_scale <= 1.0):
            return NON_FINITE
        return SPIKE if self._spikes else ""

    def action(self, anomaly: str) -> Action:
        """What the recipe says to do about it."""
        action = self._policy.spike if anomaly == SPIKE else self._policy.non_finite
        return action or "stop"

    def passed(self, progress: Progress, *, applied: bool) -> None:
        """Take note of a step that was none; the window holds losses of updates only."""
        progress.left_out_in_a_row = 0
        if applied and self.loss is not None and math.isfinite(self.loss):
            window = [*progress.recent_losses, self.loss]
            progress.recent_losses = window[-self._policy.spike_window :]


def is_spike(loss: float, recent: list[float], policy: Anomalies) -> bool:
    """Whether `loss` is above the running mean of a full window by what the policy allows."""
    window = recent[-policy.spike_window :]
    if len(window) < policy.spike_window:
        return False
    mean = statistics.fmean(window)
    if policy.spike_factor is not None and loss > mean * policy.spike_factor:
        return True
    if policy.spike_deviations is None:
        return False
    return loss > mean + policy.spike_deviations * statistics.pstdev(window, mean)


def leave_out(progress: Progress, start: int, stop: int) -> None:
    """Take note that no update is from positions [start, stop) of the sample order; what overlaps
    or adjoins an earlier range becomes one with it."""
    ranges = sorted([*progress.left_out, [start, stop]])
    joined: list[list[int]] = []
    for low, high in ranges:
        if joined and low <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], high)
        else:
            joined.append([low, high])
    progress.left_out = joined
