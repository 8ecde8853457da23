"""What the stages for optimizers have in common."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from pipeline.contracts.optimizer import NamedParameter
from pipeline.contracts.stage import PlanView
from pipeline.errors import Problem
from stages.optimizer.groups import GroupSettings, make_groups

Fraction = Annotated[float, Ge(0), Lt(1)]
BELONGS: Mapping[str, Schedule] = {
    "decay_ratio": "wsd",
    "decay_steps": "wsd",
    "decay_shape": "wsd",
    "power": "polynomial",
}
"""Fields that mean something to one schedule alone."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Learning rate, weight decay, groups, schedule and clipping."""

    lr: Annotated[float, Gt(0)]
    """Base (peak) learning rate."""

    weight_decay: Annotated[float, Ge(0)] = 0.01
    """Decoupled weight decay of matrices (parameters of two or more dimensions)."""

    decay_all: bool = False
    """Decay biases and normalisation weights too, instead of matrices only."""

    groups: tuple[GroupSettings, ...] = ()
    """Parameters with a learning rate or weight decay of their own: embeddings, the head, the B
    matrices of adapters (Hayou et al. 2024, LoRA+)."""

    schedule: Schedule = "cosine"
    """How the learning rate moves after warm-up: it stays (constant), falls to `final_lr_ratio`
    along a line, a cosine or a power of a line (polynomial), falls with the inverse root of the
    step (inverse_sqrt), or stays and falls at the end (wsd: warm-up, stable, decay)."""

    warmup_steps: Annotated[int, Ge(0)] = 0
    """Steps of linear warm-up. Excludes `warmup_ratio`."""

    warmup_ratio: Fraction = 0.0
    """Warm-up as a fraction of all steps, rounded up. Excludes `warmup_steps`."""

    decay_ratio: Annotated[float, Gt(0), Le(1)] | None = None
    """With schedule wsd: the last fraction of all steps, rounded up, in which the rate falls; null
    means a tenth. Excludes `decay_steps`."""

    decay_steps: Annotated[int, Gt(0)] | None = None
    """With schedule wsd: the last steps, in which the rate falls. Excludes `decay_ratio`."""

    decay_shape: Shape | None = None
    """With schedule wsd: what the rate falls along: a line, a cosine, or 1 less the square root of
    the steps of the fall (sqrt); null means a line."""

    power: Annotated[float, Gt(0)] | None = None
    """With schedule polynomial: the exponent; null means 2."""

    final_lr_ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    """Learning rate that the step behind the last would have, as a fraction of `lr`; nothing to the
    schedules constant and inverse_sqrt."""

    max_grad_norm: Annotated[float, Gt(0)] | None = 1.0
    """Clip the gradient of the whole model to this L2 norm; null does not clip."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        for one, other in (("warmup_ratio", "warmup_steps"), ("decay_ratio", "decay_steps")):
            if getattr(self, one) and getattr(self, other):
                yield Problem(key=one, message=f"excludes {other}", hint="give only one")
        for key, schedule in BELONGS.items():
            if getattr(self, key) is not None and self.schedule != schedule:
                yield Problem(
                    key=key,
                    message=f"means nothing to the schedule {self.schedule}",
                    hint=f"set schedule: {schedule} or leave it out",
                )

    def lr_scale(self, step: int, total: int) -> float:
        """Factor on every group's base rate for zero-based `step` of `total`."""
        return lr_scale(
            step,
            total,
            schedule=self.schedule,
            warmup=self._warmup(total),
            final_scale=self.final_lr_ratio,
            decay=self.decay_steps or steps_in(self.decay_ratio or 0.1, total),
            shape=self.decay_shape or "linear",
            power=self.power or 2.0,
        )

    def schedule_warnings(self, total: int) -> Iterator[str]:
        """What is hardly meant of learning rates over `total` steps, and what to set instead."""
        warmup = self._warmup(total)
        key = "warmup_steps" if self.warmup_steps else "warmup_ratio"
        if not any(self.lr_scale(step, total) for step in range(total)):
            yield (
                f"the learning rate is 0 at every step: warm-up begins with 0 and takes {warmup} "
                f"steps; set a lower {key}"
            )
        elif warmup >= total:
            yield (
                f"warm-up takes {warmup} steps and the training {total}: the learning rate rises "
                f"to the end; set a lower {key}"
            )

    def _warmup(self, total: int) -> int:
        return self.warmup_steps or steps_in(self.warmup_ratio, total)

    def make_groups(
        self, *, shards: bool = False
    ) -> Callable[[Iterable[NamedParameter]], list[dict[str, Any]]]:
        """A model's parameters -> torch parameter groups. Raises StageError."""
        return functools.partial(
            make_groups,
            lr=self.lr,
            weight_decay=self.weight_decay,
            decay_all=self.decay_all,
            own=self.groups,
            shards=shards,
        )


Schedule = Literal["constant", "linear", "cosine", "polynomial", "inverse_sqrt", "wsd"]
Shape = Literal["linear", "cosine", "sqrt"]


def lr_scale(
    step: int,
    total: int,
    *,
    schedule: Schedule,
    warmup: int,
    final_scale: float,
    decay: int = 0,
    shape: Shape = "linear",
    power: float = 1.0,
) -> float:
    """Factor on the base learning rate for zero-based `step` of `total`, as in transformers.

    Rises linearly from 0 over `warmup` steps, step / warmup. Then:

    - constant: stays at 1.
    - inverse_sqrt: sqrt(warmup / step) (Vaswani et al. 2017, section 5.3).
    - the others go to `final_scale`, which the step behind the last would have: linear; cosine by
      half a cosine (Loshchilov & Hutter 2017, SGDR, eq. 5); polynomial with what is left of the
      steps to the `power`; wsd stays at 1 and falls in the last `decay` steps (Hu et al. 2024,
      MiniCPM, section 4), in the `shape` of a line, a cosine, or 1 less a square root (Hägele et
      al. 2024).
    """
    if step < warmup:
        return step / warmup
    if schedule == "constant":
        return 1.0
    if schedule == "inverse_sqrt":
        return math.sqrt(warmup / step) if warmup else 1.0 / math.sqrt(step + 1)
    begin = max(warmup, total - decay) if schedule == "wsd" else warmup
    position = (step - begin) / max(total - begin, 1)
    left = 1.0 - min(max(position, 0.0), 1.0)
    if "cosine" in (schedule, shape):
        left = 0.5 * (1.0 - math.cos(math.pi * left))
    elif shape == "sqrt":
        left = 1.0 - math.sqrt(1.0 - left)
    elif schedule == "polynomial":
        left = left**power
    return final_scale + (1.0 - final_scale) * left


def steps_in(ratio: float, total: int) -> int:
    """A fraction of all steps, rounded up."""
    return math.ceil(round(ratio * total, 9))  # 0.07 x 100 is a little more than 7 in binary
