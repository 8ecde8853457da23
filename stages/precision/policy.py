"""The stage `precision.policy`: the dtypes of a training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from pipeline import Context, DtypeName, LossScaling, PlanView, Precision, Problem

if TYPE_CHECKING:
    import torch


def emulates_narrow(device: torch.device) -> bool:
    """Whether a device only emulates bf16 and fp16: processors before AVX-512."""
    import torch

    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """Choose the dtypes of training; they mean the same under every strategy."""

    compute: DtypeName = "bf16"
    """Dtype of parameters, activations and inputs in forward and backward."""

    master: DtypeName = "fp32"
    """Dtype of the weights that the optimizer updates. Below fp32, rounding loses small updates."""

    reduce: DtypeName = "fp32"
    """Dtype of gradients while they are averaged over ranks."""

    buffer: DtypeName | None = None
    """Dtype of floating buffers; null keeps what the model declares (rotary tables are fp32)."""

    tf32: bool = False
    """Round what fp32 products read to 11 significant bits (TF32): with fp32 compute, and on GPUs
    that have it (NVIDIA's from Ampere on), several times faster. Other numbers than without."""

    initial_loss_scale: Annotated[float, Gt(0)] = 65536.0
    """With fp16 compute: the loss scale to start from, a power of two."""

    loss_scale_growth_interval: Annotated[int, Gt(0)] = 2000
    """With fp16 compute: steps without overflow after which the loss scale doubles."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        if self.compute == "fp32" and self.master != "fp32":
            message = "master weights are narrower than compute"
            yield Problem(key="master", message=message, hint="write fp32")
        if self.master == "fp16":
            message = "fp16 master weights underflow"
            yield Problem(key="master", message=message, hint="write fp32 or bf16")
        if self.compute == "fp16" and self.master != "fp32":
            yield Problem(key="master", message="fp16 compute needs fp32 master weights")
        if self.tf32 and self.compute != "fp32":
            message = f"changes nothing: products are in {self.compute}"
            yield Problem(key="tf32", message=message, hint="leave it out", warning=True)
        if self.initial_loss_scale != 2 ** round(math.log2(self.initial_loss_scale)):
            yield Problem(key="initial_loss_scale", message="is not a power of two")

    def run(self, ctx: Context) -> Precision:
        import torch

        if self.compute != "fp32" and emulates_narrow(ctx.dist.device):
            faster = "compute: fp32 in the precision slot is many times faster"
            ctx.log.warning("this processor emulates %s; %s", self.compute, faster)
        if self.tf32 and ctx.dist.device.type == "cuda":
            # Not the newer torch.backends.cuda.matmul.fp32_precision: behind that, this function's
            # counterpart raises, which torch's compiler calls.
            torch.set_float32_matmul_precision("high")
        return self.declared()

    def declared(self) -> Precision:
        """The precision that the fields declare."""
        scaling = LossScaling(
            initial_scale=self.initial_loss_scale, growth_interval=self.loss_scale_growth_interval
        )
        return Precision(
            master=self.master,
            compute=self.compute,
            reduce=self.reduce,
            buffer=self.buffer,
            loss_scaling=scaling if self.compute == "fp16" else None,
        )
