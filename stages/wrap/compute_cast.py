"""Run a module's forward and backward in the compute dtype while its parameters stay in master
dtype.

Every module sees its own parameters cast, as sharding strategies do when they gather; gradients
come back through the cast in master dtype. Unlike autocast no operator keeps another dtype, so a
policy means the same with and without sharding. Works under activation checkpointing: the cast is
repeated whenever a module's forward is. A module that reads a child's parameter
without calling the child finds it uncast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def cast_on_use(model: nn.Module, dtype: torch.dtype) -> None:
    """Install the cast on every module of `model` that owns a floating parameter of another
    dtype."""
    for module in model.modules():
        if any(_differs(parameter, dtype) for parameter in module.parameters(recurse=False)):
            module.register_forward_pre_hook(Shadow(dtype))
            module.register_forward_hook(_unshadow, always_call=True)


def _differs(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype != dtype


class Shadow:
    """Forward pre-hook: attributes found in `__dict__` come before `_parameters`, so the cast
    tensors are what the module's forward reads."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and _differs(parameter, self.dtype):
                module.__dict__[name] = parameter.to(self.dtype)


def _unshadow(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    for name in module._parameters:
        module.__dict__.pop(name, None)


def installed_casts(model: nn.Module) -> list[Shadow]:
    """The casts that really are on the model's modules."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    return [hook for hook in hooks if isinstance(hook, Shadow)]
