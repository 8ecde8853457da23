"""Run a module's forward and backward in the compute dtype while its parameters stay in the master
dtype.

Every module sees its own parameters cast, as sharding strategies cast when they gather; gradients
come back through the cast in the master dtype. Unlike under autocast, no operator keeps another
dtype, so a policy means the same with and without sharding. Works under activation checkpointing:
the cast is repeated with a module's forward. A module also finds its children's parameters
cast, but not its grandchildren's, which it can only use by calling the children.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stages.model.block_changes import around_forward, hooks_before

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def cast_on_use(model: nn.Module, dtype: torch.dtype) -> None:
    """Install the cast on every module of `model` that finds a floating parameter of another
    dtype."""
    for module in model.modules():
        if isinstance(module, CONTAINERS):
            continue
        owners = [
            owner
            for owner in _visible(module)
            if any(_differs(parameter, dtype) for parameter in owner.parameters(recurse=False))
        ]
        if owners:
            cast = ParameterCast(dtype, owners)
            around_forward(module, cast, cast.undo)


def _visible(module: nn.Module) -> Iterator[nn.Module]:
    """The module and its children; a container's children, as nothing calls it, count too."""
    yield module
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from _visible(child)
        else:
            yield child


def _differs(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype != dtype


class ParameterCast:
    """Forward pre-hook that casts parameters for the time of a forward.

    The cast tensors take the places of the parameters, where a module finds them. One that a
    caller's hook has put there is used, and left in place.
    """

    def __init__(self, dtype: torch.dtype, owners: Sequence[nn.Module]) -> None:
        self.dtype = dtype
        self._owners = owners
        self._replaced: list[list[tuple[nn.Module, str, nn.Parameter]]] = []

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        replaced = [
            (owner, name, parameter)
            for owner in self._owners
            for name, parameter in owner._parameters.items()
            if parameter is not None and _differs(parameter, self.dtype)
        ]
        for owner, name, parameter in replaced:
            owner._parameters[name] = parameter.to(self.dtype)  # type: ignore[assignment]
        self._replaced.append(replaced)

    def undo(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook: put the parameters of the latest forward back."""
        for owner, name, parameter in self._replaced.pop() if self._replaced else ():
            owner._parameters[name] = parameter


def installed_casts(model: nn.Module) -> list[ParameterCast]:
    """The casts that are on the model's modules."""
    hooks = [hook for module in model.modules() for hook in hooks_before(module)]
    return [hook for hook in hooks if isinstance(hook, ParameterCast)]
