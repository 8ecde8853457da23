"""AdamW."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Gt

from pipeline import Context, OptimizerPlan, PlanView, Precision, Problem, traits
from stages.optimizer import Fraction, OptimizerSettings

Kernel = Literal["fused", "single"]
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
    """Implementation: fused (the fastest), or one tensor at a time. It is torch's, unless `moments`
    or `stochastic_rounding` ask for more: then fused is compiled at the first update of each shape.
    A wrap stage may have its own kernels."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from super().check(plan)
        wraps = plan.readers(self) if self.stochastic_rounding else ()
        for policy in (plan.producer(wrap, Precision) for wrap in wraps):
            if isinstance(policy, traits.DeclaresDtypes) and policy.master != "bf16":
                yield Problem(
                    key="stochastic_rounding",
                    message=f"rounds to bf16, the master weights are {policy.master}",
                    hint="set master: bf16 in the precision slot",
                )
        if self.algorithm != "adamw" and importlib.util.find_spec("torchao") is None:
            yield Problem(
                key="moments" if self.moments != "master" else "stochastic_rounding",
                message=f"needs torchao, which computes the update rule {self.algorithm}",
                hint="pip install 'pipetrain[torchao]'",
            )

    @property
    def algorithm(self) -> str:
        stored = "" if self.moments == "master" else f"_{self.moments}"
        return f"adamw{stored}" + ("_stochastic" if self.stochastic_rounding else "")

    def run(self, ctx: Context) -> OptimizerPlan:
        import torch

        rule: dict[str, Any] = {
            "moments": ("exp_avg", "exp_avg_sq"),
            "betas": tuple(self.betas),
            "eps": self.eps,
        }
        fused, rounds = self.kernel == "fused", self.stochastic_rounding
        if self.algorithm == "adamw":
            plain = functools.partial(torch.optim.AdamW, fused=fused, foreach=False)
            return self.plan(plain, **rule)
        from stages.optimizer.rules_compat import LowBitAdamW, MomentCodec

        codec = MomentCodec(self.moments)
        seed = ctx.seed if rounds else None
        low_bit = functools.partial(LowBitAdamW, codec=codec, rounding_seed=seed, compiled=fused)
        return self.plan(low_bit, packing=codec, shards=rounds, **rule)
