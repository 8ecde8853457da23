"""Can what makes a model faster work here? Told before anything starts, without heavy imports."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.errors import Problem
from pipeline.stage import PlanView

if TYPE_CHECKING:
    from stages.model.hf import HfModel

FLASH = "flash_attention_"


def speed_problems(stage: HfModel, plan: PlanView) -> Iterator[Problem]:
    """Mistakes in the fields about attention, kernels and fp8."""
    yield from _attention(stage.attention, plan)
    again = stage.activation_checkpointing
    if again is not None and again.keep == "attention" and stage.attention == "eager":
        yield Problem(
            key="activation_checkpointing.keep",
            message="eager attention is no single operation whose result could be kept",
            hint="set attention: sdpa, or keep: matmuls",
        )
    if again is not None and again.offload and stage.compile is not None:
        yield Problem(
            key="compile",
            message="torch compiles no block whose activations are offloaded",
            hint="leave it out, or set activation_checkpointing.offload: false",
        )
    if stage.kernels is not None:
        yield from _needs(plan, "kernels", "Liger", "liger_kernel", "liger-kernel")
    if stage.fp8 is not None:
        yield from _fp8(stage, plan)


def _attention(name: str, plan: PlanView) -> Iterator[Problem]:
    if name.startswith(FLASH) or "/" in name:
        package = "kernels" if "/" in name or not _installed("flash_attn") else "flash_attn"
        yield from _needs(plan, "attention", name, package, package)
    elif name == "flex_attention" and plan.device == "cpu":
        yield Problem(
            key="attention",
            message="flex_attention computes no gradients on a CPU",
            hint="use sdpa",
        )


def _fp8(stage: HfModel, plan: PlanView) -> Iterator[Problem]:
    assert stage.fp8 is not None
    if not _installed("torchao"):
        yield Problem(key="fp8", message="needs torchao", hint="pip install 'pipetrain[torchao]'")
    if stage.fp8.emulate:
        return
    if plan.device == "cpu":
        yield Problem(
            key="fp8",
            message="needs a GPU with 8-bit products (compute capability 8.9 or above)",
            hint="set fp8.emulate: true to try it, slowly",
        )
    if stage.compile is None:
        yield Problem(
            key="fp8",
            message="is slower than bf16 without compile, as every cast is a pass of its own",
            hint="set compile: {}",
        )


def _needs(plan: PlanView, key: str, what: str, module: str, package: str) -> Iterator[Problem]:
    if plan.device == "cpu":
        yield Problem(key=key, message=f"{what} needs a GPU")
    elif not _installed(module):
        yield Problem(key=key, message=f"{what} needs {package}", hint=f"pip install {package}")


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
