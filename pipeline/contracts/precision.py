"""Dtypes of a training, under names that recipes use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


DtypeName = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes with one meaning under every strategy.

    master: the dtype the optimizer updates. compute: parameters, activations and inputs of forward
    and backward. reduce: gradients while they are reduced over ranks. buffer: floating buffers;
    None keeps what the model declares. The loss and the gradient norm are always fp32."""

    master: DtypeName
    compute: DtypeName
    reduce: DtypeName
    buffer: DtypeName | None
    loss_scaling: LossScaling | None
    """Set exactly when `compute` is fp16."""


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Dynamic loss scaling (Micikevicius et al. 2018, Mixed Precision Training, section 3.2):
    doubled after `growth_interval` steps without overflow, halved (and the step skipped) on one."""

    initial_scale: float = 65536.0
    growth_interval: int = 2000


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a DtypeName."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The DtypeName of a torch dtype; torch's name for a dtype that a recipe cannot ask for."""
    import torch

    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
