"""AdamW."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Gt

from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.precision import Precision
from pipeline.contracts.stage import Context, PlanView
from pipeline.errors import Problem
from stages.optimizer.settings import Fraction, OptimizerSettings

if TYPE_CHECKING:
    from torch.optim import Optimizer

Kernel = Literal["fused", "foreach", "single"]
Moments = Literal["master", "fp32", "bf16", "fp8", "8bit", "4bit"]


@dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerSettings):
    """Declare AdamW (Loshchilov & Hutter 2019, Decoupled Weight Decay Regularization), its schedule
    and gradient clipping."""

    lr: Annotated[float, Gt(0)] = 1e-5
    """Base (peak) learning rate."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of the first and second moment."""

    eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the root of the second moment."""

    moments: Moments = "master"
    """What both moments are kept in: the dtype of the master weights, another dtype, or blocks of 8
    bits (8bit, fp8) or 4 (4bit), each with a scale in fp32. All is computed in fp32. What is not
    `master` needs torchao; checkpoints hold the values, in fp32 where they are kept in blocks."""

    stochastic_rounding: bool = False
    """With bf16 master weights: round an updated weight to one of its two neighbours at random, so
    that the mean is right, where otherwise small updates are lost. Needs torchao."""

    kernel: Kernel = "fused"
    """Implementation: fused (the fastest), foreach, or one tensor at a time. It is torch's, unless
    `moments` or `stochastic_rounding` ask for more: then fused is compiled when a shape is first
    updated, and foreach is not there. A wrap stage may have kernels of its own."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from super().check(plan)
        if self.stochastic_rounding:
            yield from self._rounding_problems(plan)
        if self.algorithm == "adamw":
            return
        needs = f"needs torchao, which the update rule {self.algorithm} is computed with"
        key = "moments" if self.moments != "master" else "stochastic_rounding"
        if importlib.util.find_spec("torchao") is None:
            yield Problem(key=key, message=needs, hint="pip install 'pipetrain[torchao]'")
        if self.kernel == "foreach":
            yield Problem(
                key="kernel",
                message=f"the update rule {self.algorithm} has no foreach kernel",
                hint="set kernel: fused or single",
            )

    def _rounding_problems(self, plan: PlanView) -> Iterator[Problem]:
        for policy in plan.giving(Precision):
            if policy.master != "bf16":
                yield Problem(
                    key="stochastic_rounding",
                    message=f"rounds to bf16, the master weights are {policy.master}",
                    hint="set master: bf16 in the precision slot",
                )

    @property
    def algorithm(self) -> str:
        """Name of the update rule."""
        kept = "" if self.moments == "master" else f"_{self.moments}"
        return f"adamw{kept}" + ("_stochastic" if self.stochastic_rounding else "")

    def run(self, ctx: Context) -> OptimizerPlan:
        hyperparameters = {
            "lr": self.lr,
            "betas": tuple(self.betas),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }
        plan = OptimizerPlan(
            algorithm=self.algorithm,
            hyperparameters=hyperparameters,
            groups=self.make_groups(),
            moments=("exp_avg", "exp_avg_sq"),
            build=functools.partial(_build, hyperparameters=hyperparameters, kernel=self.kernel),
            lr_scale=self.lr_scale,
            schedule_warnings=self.schedule_warnings,
            max_grad_norm=self.max_grad_norm,
        )
        return plan if self.algorithm == "adamw" else self._low_bit(plan, ctx.seed)

    def _low_bit(self, plan: OptimizerPlan, seed: int) -> OptimizerPlan:
        from stages.optimizer.low_bit_adamw import LowBitAdamW
        from stages.optimizer.quantized_moments import packing

        kept = packing(self.moments)
        build = functools.partial(
            LowBitAdamW,
            **plan.hyperparameters,
            packing=kept,
            rounding_seed=seed if self.stochastic_rounding else None,
            compiled=self.kernel == "fused",
        )
        groups = self.make_groups(shards=self.stochastic_rounding)
        return replace(plan, packing=kept, build=build, groups=groups)


def _build(
    groups: list[dict[str, Any]], *, hyperparameters: dict[str, Any], kernel: Kernel
) -> Optimizer:
    import torch

    return torch.optim.AdamW(
        groups, **hyperparameters, fused=kernel == "fused", foreach=kernel == "foreach"
    )
