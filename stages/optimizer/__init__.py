"""Stages that declare an optimizer: their base (learning rate, schedule, parameter groups,
clipping), Lion, and no optimizer."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

from pipeline import (
    Context,
    NamedParameter,
    OptimizerPart,
    OptimizerPlan,
    PlanView,
    Problem,
    StageError,
    StateCodec,
    UpdateRule,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

Fraction = Annotated[float, Ge(0), Lt(1)]
Schedule = Literal["constant", "linear", "cosine", "polynomial", "inverse_sqrt", "wsd"]
Shape = Literal["linear", "cosine", "sqrt"]
SCHEDULE_OF: Mapping[str, Schedule] = {
    "decay_ratio": "wsd",
    "decay_steps": "wsd",
    "decay_shape": "wsd",
    "power": "polynomial",
}
"""Fields of one schedule only."""
INVERSE_SQRT_STEPS = 10_000
"""Steps after which inverse_sqrt begins if there is no warm-up, as in transformers."""


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """Parameters with their own learning rate or weight decay."""

    match: Annotated[tuple[str, ...], MinLen(1)]
    """Patterns of parameter names, with `*` for any text and `?` for any character
    (`*.lora_B.*`). A parameter belongs to the first group that matches it."""

    lr_ratio: Annotated[float, Gt(0)] = 1.0
    """Their learning rate as a multiple of `lr`."""

    weight_decay: Annotated[float, Ge(0)] | None = None
    """Their weight decay, whatever their dimensions; null decays them as all others."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Base of optimizer stages: learning rate, weight decay, groups, schedule and clipping.

    A stage derives from it, adds the fields of its update rule, and passes `plan` a torch class:

        @dataclass(frozen=True, kw_only=True)
        class Sgd(OptimizerSettings):
            momentum: float = 0.9

            def run(self, ctx: Context) -> OptimizerPlan:
                from torch.optim import SGD

                kept = ("momentum_buffer",)
                return self.plan(SGD, moments=kept, counts_updates=False, momentum=self.momentum)
    """

    lr: Annotated[float, Gt(0)]
    """Base (peak) learning rate."""

    weight_decay: Annotated[float, Ge(0)] = 0.01
    """Weight decay of matrices (parameters of two or more dimensions)."""

    decay_all: bool = False
    """Decay biases and normalisation weights too, instead of matrices only."""

    groups: tuple[GroupSettings, ...] = ()
    """Parameters with their own learning rate or weight decay: embeddings, the head, the B matrices
    of adapters (Hayou et al. 2024, LoRA+)."""

    schedule: Schedule = "cosine"
    """How the learning rate moves after warm-up: it stays (constant), falls to `final_lr_ratio`
    along a line, a cosine or a power of a line (polynomial), falls with the inverse root of the
    step (inverse_sqrt; without warm-up, as after 10,000 steps), or stays and falls at the end (wsd:
    warm-up, stable, decay)."""

    warmup_steps: Annotated[int, Ge(0)] = 0
    """Steps of linear warm-up, from 0, or with schedule wsd from `final_lr_ratio`. Excludes
    `warmup_ratio`."""

    warmup_ratio: Fraction = 0.0
    """Warm-up as a fraction of all steps, rounded up. Excludes `warmup_steps`."""

    decay_ratio: Annotated[float, Gt(0), Le(1)] | None = None
    """With schedule wsd: the last fraction of all steps, rounded up, in which the rate falls; null
    means a tenth. Excludes `decay_steps`."""

    decay_steps: Annotated[int, Gt(0)] | None = None
    """With schedule wsd: the last steps, in which the rate falls. Excludes `decay_ratio`."""

    decay_shape: Shape | None = None
    """With schedule wsd: the rate falls along a line, a cosine, or 1 less the square root of the
    steps of the fall (sqrt); null means a line."""

    power: Annotated[float, Gt(0)] | None = None
    """With schedule polynomial: the exponent; null means 2."""

    final_lr_ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    """Learning rate that the step after the last would have, as a fraction of `lr`; without effect
    on the schedules constant and inverse_sqrt."""

    max_grad_norm: Annotated[float, Gt(0)] | None = 1.0
    """Clip the gradient of the whole model to this L2 norm; null does not clip."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        for one, other in (("warmup_ratio", "warmup_steps"), ("decay_ratio", "decay_steps")):
            if getattr(self, one) and getattr(self, other):
                yield Problem(key=one, message=f"excludes {other}", hint="give only one")
        for key, schedule in SCHEDULE_OF.items():
            if getattr(self, key) is not None and self.schedule != schedule:
                yield Problem(
                    key=key,
                    message=f"has no effect on the schedule {self.schedule}",
                    hint=f"set schedule: {schedule} or leave it out",
                )

    @property
    def algorithm(self) -> str:
        """Name of the update rule, unique to it."""
        return type(self).__name__.lower()

    def update_rules(self) -> Sequence[UpdateRule]:
        """The rule of each part; a stage of several parts, or of a rule for whole matrices,
        overrides this."""
        return [UpdateRule(self.algorithm)]

    def plan(self, optimizer: Callable[..., Optimizer], **given: Any) -> OptimizerPlan:
        """An OptimizerPlan of one part; see `part`."""
        return self.plan_of(self.part(optimizer, **given))

    def plan_of(self, *parts: OptimizerPart) -> OptimizerPlan:
        """An OptimizerPlan of these parts, with the clipping of these settings. For a part with
        another rate or schedule, call `part` of `dataclasses.replace(self, lr=...)`."""
        return OptimizerPlan(
            parts=parts,
            schedule_warnings=self.schedule_warnings,
            max_grad_norm=self.max_grad_norm,
        )

    def part(
        self, optimizer: Callable[..., Optimizer], *, moments: Sequence[str],
        counts_updates: bool = True, packing: StateCodec | None = None,
        rule: UpdateRule | None = None, name: str = "",
        takes: Callable[[NamedParameter], bool] = lambda parameter: True, shards: bool = False,
        **arguments: Any,
    ) -> OptimizerPart:  # fmt: skip
        """A part of an optimizer with these settings.

        `optimizer` is a torch optimizer class, made with parameter groups, `lr`, `weight_decay` and
        `arguments`, and after the groups a WholeMatrices if its `rule` needs one. `moments`,
        `counts_updates`, `packing`, `name` and `takes` are fields of OptimizerPart; `rule` is the
        first of `update_rules` by default. With `shards`, each group has the number of this
        process's shard. Raises StageError if the class does not take these arguments.
        """
        arguments = {"lr": self.lr, "weight_decay": self.weight_decay, **arguments}
        rule = rule or self.update_rules()[0]
        given = ["groups"] if rule.elementwise else ["groups", "whole"]
        try:
            inspect.signature(optimizer).bind(*given, **arguments)
        except TypeError as error:
            kind = getattr(optimizer, "__name__", str(optimizer))
            called = ", ".join([*given, *(f"{each}=..." for each in arguments)])
            raise StageError(f"{kind}: {error}", hint=f"it is called as {kind}({called})") from None
        return OptimizerPart(
            name=name,
            takes=takes,
            algorithm=rule.algorithm,
            elementwise=rule.elementwise,
            hyperparameters=arguments,
            groups=functools.partial(make_groups, self, shards=shards),
            moments=moments,
            packing=packing,
            counts_updates=counts_updates,
            build=functools.partial(optimizer, **arguments),
            lr_scale=self.lr_scale,
        )

    def lr_scale(self, step: int, total: int) -> float:
        """Factor on the base learning rates for zero-based `step` of `total`, as in transformers:
        step / warm-up, then as the fields say. Loshchilov & Hutter 2017, SGDR, eq. 5 (cosine);
        Vaswani et al. 2017, section 5.3 (inverse_sqrt); Hu et al. 2024, MiniCPM, section 4 (wsd);
        Hägele et al. 2024 (sqrt)."""
        warmup = self.warmup_steps or steps_in(self.warmup_ratio, total)
        if step < warmup:
            rises_from = self.final_lr_ratio if self.schedule == "wsd" else 0.0
            return rises_from + (1.0 - rises_from) * step / warmup
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "inverse_sqrt":
            scale = warmup or INVERSE_SQRT_STEPS
            return math.sqrt(scale / (step - warmup + scale))
        begin = warmup
        if self.schedule == "wsd":
            decay = self.decay_steps or steps_in(self.decay_ratio or 0.1, total)
            begin = max(warmup, total - decay)
        left = 1.0 - min(max((step - begin) / max(total - begin, 1), 0.0), 1.0)
        if "cosine" in (self.schedule, self.decay_shape):
            left = 0.5 * (1.0 - math.cos(math.pi * left))
        elif self.decay_shape == "sqrt":
            left = 1.0 - math.sqrt(1.0 - left)
        elif self.schedule == "polynomial":
            left = left ** (self.power or 2.0)
        return self.final_lr_ratio + (1.0 - self.final_lr_ratio) * left

    def schedule_warnings(self, total: int) -> Iterator[str]:
        """A warning if warm-up takes all of `total` steps."""
        warmup = self.warmup_steps or steps_in(self.warmup_ratio, total)
        if warmup >= total:
            begin = "" if self.lr_scale(0, total) else "begins with a learning rate of 0 and "
            yield (
                f"warm-up {begin}takes {warmup} steps, and the "
                f"training {total}; set a lower warmup_steps or warmup_ratio"
            )


@dataclass(frozen=True, kw_only=True)
class Lion(OptimizerSettings):
    """Declare Lion (Chen et al. 2023, Symbolic Discovery of Optimization Algorithms), its schedule
    and gradient clipping. It keeps one moment where AdamW keeps two, and wants about a tenth of
    AdamW's learning rate and ten times its weight decay."""

    lr: Annotated[float, Gt(0)] = 1e-6
    """Base (peak) learning rate."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    """Share of the moment in the update, and decay rate of the moment."""

    def run(self, ctx: Context) -> OptimizerPlan:
        from stages.optimizer.rules_compat import LionOptimizer

        return self.plan(
            LionOptimizer, moments=("exp_avg",), counts_updates=False, betas=tuple(self.betas)
        )


@dataclass(frozen=True, kw_only=True)
class NoOptimizer:
    """Declare that the model of the next wrap slot is not trained: it is held in the compute dtype,
    without gradients and optimizer state, to score samples."""

    def update_rules(self) -> Sequence[UpdateRule]:
        return ()

    def run(self, ctx: Context) -> OptimizerPlan:
        return OptimizerPlan(parts=(), max_grad_norm=None)


def steps_in(ratio: float, total: int) -> int:
    """A fraction of all steps, rounded up."""
    return math.ceil(round(ratio * total, 9))  # 0.07 x 100 is a little more than 7 in binary


def make_groups(
    settings: OptimizerSettings, parameters: Iterable[NamedParameter], *, shards: bool = False
) -> list[dict[str, Any]]:
    """Trainable parameters in torch groups of equal rate and decay, in order: the settings' own
    groups, then the rest; decayed parameters first. With `shards`, each group has the number of
    this process's shard, and each parameter its name. Raises StageError for a pattern that adds no
    parameter to its group."""
    trained = [one for one in parameters if one.parameter.requires_grad]
    left, places = [one.name for one in trained], dict[str, int]()
    for place, own in enumerate(settings.groups):
        for pattern in own.match:
            matched = [name for name in left if fnmatchcase(name, pattern)]
            if not matched:
                raise StageError(
                    f"groups.{place}.match: {pattern!r} matches no trained parameter that is in no "
                    "earlier group",
                    hint=f"such parameters have names like {', '.join(left[:3])}; a tied head is "
                    "part of the embedding",
                )
            places |= dict.fromkeys(matched, place)
        left = [name for name in left if name not in places]
    found: dict[tuple[int, float, int], dict[str, Any]] = {}
    for name, parameter, shape, number, _ in trained:
        place = places.get(name, len(settings.groups))
        decays = settings.decay_all or len(shape) >= 2
        decay = settings.weight_decay if decays else 0.0
        group: dict[str, Any] = {"params": []}
        if shards:
            group["shard"] = number
            parameter.full_name = name  # type: ignore[attr-defined]
        if place < len(settings.groups):
            own = settings.groups[place]
            group["lr"] = settings.lr * own.lr_ratio
            decay = decay if own.weight_decay is None else own.weight_decay
        group["weight_decay"] = decay
        key = (place, -decay, group.get("shard", 0))
        found.setdefault(key, group)["params"].append(parameter)
    return [found[key] for key in sorted(found)]
