"""Divided parameters as plain tensors, for strategies that cannot hold DTensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stages.wrap.tensor.compat import sharded_dim

Wholes = Mapping[str, DTensor]
"""Name of each parameter -> the DTensor that it was, on the meta device."""


def take_parts(module: nn.Module) -> Wholes:
    """Replace each parameter, a DTensor on the meta device, by this rank's part of it, also on the
    meta device. Tied ones stay one object."""
    wholes: dict[str, DTensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        assert isinstance(parameter.data, DTensor)
        wholes[name] = parameter.data
    replace_parameters(module, lambda parameter: parameter.data.to_local())  # type: ignore[attr-defined]
    return wholes


def replace_parameters(module: nn.Module, changed: Callable[[nn.Parameter], Tensor]) -> None:
    """Replace each parameter by one of other values, or by a parameter. Tied ones stay one
    object."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if parameter not in made:
            value = changed(parameter)
            made[parameter] = (
                value
                if isinstance(value, nn.Parameter)
                else nn.Parameter(value, requires_grad=parameter.requires_grad)
            )
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._parameters[leaf] = made[parameter]


def mark(module: nn.Module, wholes: Wholes) -> None:
    """Let parameters say what they are a part of (`whole_of`)."""
    parameter: Any
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parameter.part_of = wholes[name]


def whole_of(tensor: Tensor) -> DTensor | None:
    """The tensor on the meta device that a parameter is this rank's part of; None for others."""
    whole: DTensor | None = getattr(tensor, "part_of", None)
    return whole


def is_divided(whole: DTensor) -> bool:
    """Whether ranks have different parts of it."""
    return any(sharded_dim(placement) is not None for placement in whole.placements)
