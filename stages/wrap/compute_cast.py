"""Run a module's forward and backward in the compute dtype while its parameters stay in master
dtype.

Every module sees its own parameters cast, as sharding strategies do when they gather; gradients
come back through the cast in master dtype. Unlike autocast no operator keeps another dtype, so a
policy means the same with and without sharding. Works under activation checkpointing: the cast is
repeated whenever a module's forward is. A module also finds its children's parameters cast, but
not those of their children, which it can only use by calling them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stages.wrap.torch_compat import around_forward

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def cast_on_use(model: nn.Module, dtype: torch.dtype) -> None:
    """Install the cast on every module of `model` that owns a floating parameter of another
    dtype."""
    for module in model.modules():
        if isinstance(module, CONTAINERS):
            continue
        owners = [
            owner
            for owner in _within_reach(module)
            if any(_differs(parameter, dtype) for parameter in owner.parameters(recurse=False))
        ]
        if owners:
            shadow = Shadow(dtype, owners)
            around_forward(module, shadow, shadow.lift)


def _within_reach(module: nn.Module) -> Iterator[nn.Module]:
    """The module and its children; containers, which nothing calls, are no generation."""
    yield module
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from _within_reach(child)
        else:
            yield child


def _differs(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype != dtype


class Shadow:
    """Forward pre-hook: attributes found in `__dict__` come before `_parameters`, so the cast
    tensors are what the forward reads. What a caller has cast already is used, and left to it."""

    def __init__(self, dtype: torch.dtype, owners: Sequence[nn.Module]) -> None:
        self.dtype = dtype
        self._owners = owners
        self._cast: list[list[tuple[nn.Module, str]]] = []

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        cast = [
            (owner, name)
            for owner in self._owners
            for name, parameter in owner._parameters.items()
            if parameter is not None
            and name not in owner.__dict__
            and _differs(parameter, self.dtype)
        ]
        for owner, name in cast:
            owner.__dict__[name] = owner._parameters[name].to(self.dtype)  # type: ignore[union-attr]
        self._cast.append(cast)

    def lift(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The forward hook that goes with it."""
        for owner, name in self._cast.pop() if self._cast else ():
            owner.__dict__.pop(name, None)


def installed_casts(model: nn.Module) -> list[Shadow]:
    """The casts that really are on the model's modules."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    return [hook for hook in hooks if isinstance(hook, Shadow)]
