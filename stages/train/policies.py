"""Blocks of fields of a training: what to do about anomalous steps, and when to stop early."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from pipeline.contracts.stage import PlanView
from pipeline.contracts.training import Checkpoints
from pipeline.errors import Problem

Action = Literal["stop", "skip", "rollback"]
Count = Annotated[int, Gt(0)]


@dataclass(frozen=True, kw_only=True)
class Anomalies:
    """What to do about a step whose gradient is not finite, or whose loss spikes.

    `stop` ends the run; nothing of the step is saved. `skip` leaves the update out: weights,
    optimizer state and the schedule stay where they are, and the next batch takes the step's
    place. `rollback` restores the newest checkpoint and goes on with the batch behind the anomalous
    one (as in Chowdhery et al. 2022, PaLM, section 5.1). Positions of the batches that no update is
    from are kept in the checkpoint's progress (`left_out`) and told in `metrics.jsonl`.
    """

    non_finite: Action = "stop"
    """When the norm of the gradient is infinite or not a number. An overflow that loss scaling
    takes care of is none."""

    spike: Action | None = None
    """When the loss of a step is above `spike_factor` or `spike_deviations`; null looks for none.
    Looking takes the sum of the loss over ranks before each update, instead of now and then."""

    spike_window: Annotated[int, Ge(2), Le(10_000)] = 100
    """Newest steps whose losses make up the running mean. Spikes are looked for when there have
    been so many."""

    spike_factor: Annotated[float, Gt(1)] | None = None
    """A loss above the running mean times this is a spike."""

    spike_deviations: Annotated[float, Gt(0)] | None = None
    """A loss above the running mean by so many standard deviations of the same window (of the whole
    window: divided by N, not N - 1) is a spike."""

    max_skips: Count = 5
    """Anomalous steps to skip in a row; the run stops at one more."""

    max_rollbacks: Count = 3
    """Rollbacks in the whole training; the run stops at one more."""

    @property
    def rolls_back(self) -> bool:
        """Whether training may go back to a checkpoint."""
        return "rollback" in (self.non_finite, self.spike)

    def without_rollback(self) -> Anomalies:
        """The same, with batches skipped where training would go back to a checkpoint."""
        non_finite: Action = "skip" if self.non_finite == "rollback" else self.non_finite
        spike: Action | None = "skip" if self.spike == "rollback" else self.spike
        return replace(self, non_finite=non_finite, spike=spike)

    def problems(self, plan: PlanView) -> Iterator[Problem]:
        """Mistakes that single fields do not show; keys are relative to the block."""
        measures = self.spike_factor is not None or self.spike_deviations is not None
        if self.spike is not None and not measures:
            yield Problem(
                key="spike",
                message="nothing says what a spike is",
                hint="give spike_factor or spike_deviations",
            )
        if self.spike is None and measures:
            key = "spike_factor" if self.spike_factor is not None else "spike_deviations"
            yield Problem(key=key, message="needs spike", hint="set spike: skip")
        if self.rolls_back:
            for stage in plan.giving(Checkpoints):
                if getattr(stage, "every", None) is None:
                    key = "non_finite" if self.non_finite == "rollback" else "spike"
                    yield Problem(
                        key=key,
                        message="rollback goes back to the newest checkpoint, and none is saved "
                        "before the end",
                        hint="set every in the checkpoint slot",
                    )


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """End training when the held-out loss does not get lower any more."""

    patience: Count
    """Evaluations in a row without an improvement after which training ends."""

    min_improvement: Annotated[float, Ge(0)] = 0.0
    """How far, in nats, an evaluation has to be below the one that was the last improvement, to be
    an improvement itself; with 0 any lower loss is one."""


HINT = "leave out loss_chunk_size"
CHANGED_LOGITS = (
    "loss_chunk_size: this model computes something with its logits (caps or scales them, say), so "
    "their loss cannot stand for them"
)
NO_SAMPLES = "needs held-out samples, and there are none"
GIVE_SAMPLES = "give some in the data slot (heldout_fraction or heldout_files)"
