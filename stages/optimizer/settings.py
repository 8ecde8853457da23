"""What the stages for optimizers have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from pipeline.artifacts import NamedParameter
from pipeline.errors import Problem
from pipeline.stage import PlanView
from stages.optimizer.groups import GroupSettings, make_groups
from stages.optimizer.schedule import Schedule, Shape, lr_scale, steps_in

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

    def doubts(self, total: int) -> Iterator[str]:
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
