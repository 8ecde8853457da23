"""Linear layers in 8 bits, and fused kernels; in place, names stay."""

from __future__ import annotations

from typing import Any

from torch import nn

from pipeline.errors import StageError
from pipeline.optional import optional
from stages.model.linear import linear_layers
from stages.model.options import Fp8

MULTIPLE = 16
"""Sizes that 8-bit products are defined for (torch._scaled_mm)."""


def use_fp8(model: Any, settings: Fp8) -> None:
    """Have linear layers multiply in 8 bits, but for the head and those of odd sizes. Raises
    StageError when there is none."""
    with optional("fp8 needs torchao", hint="pip install 'pipetrain[torchao]'"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = Float8LinearConfig.from_recipe_name(settings.recipe)
    object.__setattr__(config, "emulate", settings.emulate)
    suited = [
        module
        for _, module in linear_layers(model)
        if type(module) is nn.Linear
        and not module.in_features % MULTIPLE
        and not module.out_features % MULTIPLE
    ]
    if not suited:
        raise StageError(
            f"fp8: no linear layer's sizes are multiples of {MULTIPLE}", hint="leave out fp8"
        )
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: module in suited
    )


def use_liger(model: Any) -> None:
    """Replace parts of the model by Liger's kernels. Raises StageError for an architecture that it
    does not know."""
    needed = "kernels: liger needs liger-kernel, and that needs Triton"
    with optional(needed, hint="pip install liger-kernel"):
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise StageError(f"Liger has no kernels for {kind}", hint="leave out kernels")
    # Its losses would take the place of the one that is normalised over the whole step.
    _apply_liger_kernel_to_instance(
        model=model, cross_entropy=False, fused_linear_cross_entropy=False
    )
