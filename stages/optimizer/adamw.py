"""AdamW."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Gt

from pipeline import Context, OptimizerPlan, PlanView, Precision, Problem
from stages.optimizer.settings import Fraction, OptimizerSettings

if TYPE_CHECKING:
    from torch.optim import Optimizer

Kernel = Literal["fused", "foreach", "single"]
Moments = Literal["master", "fp32", "bf16", "8bit"]


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
    """Storage of both moments: the dtype of the master weights (master), another dtype, or blocks
    of 8-bit codes, each with a scale in fp32 (8bit). Updates are computed in fp32. All but `master`
    need torchao; checkpoints hold values, in fp32 for 8bit."""

    stochastic_rounding: bool = False
    """With bf16 master weights: round an updated weight to one of its two neighbours at random, so
    that the mean is exact; rounding to the nearest loses small updates. Needs torchao."""

    kernel: Kernel = "fused"
    """Implementation: fused (the fastest), foreach, or one tensor at a time. It is torch's, unless
    `moments` or `stochastic_rounding` ask for more: then fused is compiled at the first update of
    each shape, and there is no foreach. A wrap stage may have kernels of its own."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from super().check(plan)
        for policy in plan.giving(Precision) if self.stochastic_rounding else ():
            if policy.master != "bf16":
                yield Problem(
                    key="stochastic_rounding",
                    message=f"rounds to bf16, the master weights are {policy.master}",
                    hint="set master: bf16 in the precision slot",
                )
        if self.algorithm == "adamw":
            return
        if importlib.util.find_spec("torchao") is None:
            yield Problem(
                key="moments" if self.moments != "master" else "stochastic_rounding",
                message=f"needs torchao, which computes the update rule {self.algorithm}",
                hint="pip install 'pipetrain[torchao]'",
            )
        if self.kernel == "foreach":
            yield Problem(
                key="kernel",
                message=f"the update rule {self.algorithm} has no foreach kernel",
                hint="set kernel: fused or single",
            )

    @property
    def algorithm(self) -> str:
        """Name of the update rule."""
        stored = "" if self.moments == "master" else f"_{self.moments}"
        return f"adamw{stored}" + ("_stochastic" if self.stochastic_rounding else "")

    def run(self, ctx: Context) -> OptimizerPlan:
        rule: dict[str, Any] = {
            "lr": self.lr,
            "betas": tuple(self.betas),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }
        plan = self.plan(
            algorithm=self.algorithm,
            hyperparameters=rule,
            moments=("exp_avg", "exp_avg_sq"),
            build=functools.partial(_build, kernel=self.kernel, **rule),
        )
        return plan if self.algorithm == "adamw" else self._low_bit(plan, ctx.seed)

    def _low_bit(self, plan: OptimizerPlan, seed: int) -> OptimizerPlan:
        from stages.optimizer.quantized_moments import moment_codec
        from stages.optimizer.update_rules import LowBitAdamW

        codec = moment_codec(self.moments)
        build = functools.partial(
            LowBitAdamW,
            **plan.hyperparameters,
            codec=codec,
            rounding_seed=seed if self.stochastic_rounding else None,
            compiled=self.kernel == "fused",
        )
        groups = self.make_groups(shards=self.stochastic_rounding)
        return replace(plan, packing=codec, build=build, groups=groups)


def _build(groups: list[dict[str, Any]], *, kernel: Kernel, **rule: Any) -> Optimizer:
    import torch

    return torch.optim.AdamW(groups, **rule, fused=kernel == "fused", foreach=kernel == "foreach")
