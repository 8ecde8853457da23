"""The part of each parameter that a tensor-parallel rank has: as a placement of DTensor, and as a
plain tensor for strategies that cannot hold DTensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from pipeline.utils import own_chunk
from stages.wrap.tensor.compat import packed, packed_parts, sharded_dim
from stages.wrap.tensor.layers import COLUMNS, ROWS, transposed


@dataclass(frozen=True)
class Owner:
    """The entry of a plan that says how a parameter is placed."""

    entry: str
    style: str
    module: nn.Module
    """The parameter's own module."""


def owners_of(model: nn.Module, styles: Mapping[str, str]) -> dict[str, Owner]:
    """Name of each parameter in the plan -> its entry, the innermost if there are several."""
    found = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        entry = name
        while entry and entry not in styles:
            entry = entry.rpartition(".")[0]
        if entry:
            module = model.get_submodule(name.rpartition(".")[0])
            found[name] = Owner(entry, styles[entry], module)
    return found


def placements_of(
    model: nn.Module, owners: Mapping[str, Owner], shared: Mapping[str, int]
) -> dict[str, Any]:
    """Return name of every parameter -> its placement: replicated outside of the plan, and for
    shared heads."""
    return {
        name: Replicate()
        if name not in owners or owners[name].entry in shared
        else _placement(name, parameter, owners[name])
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _placement(name: str, parameter: nn.Parameter, owner: Owner) -> Any:
    """Placement of one parameter. In a layer with an update W + B A, the rows of W and B are
    outputs, the columns of W and A inputs."""
    down, up = ".lora_A." in name, ".lora_B." in name
    outputs = parameter.ndim - 2 if parameter.ndim > 1 else 0
    inputs = parameter.ndim - 1
    if parameter.ndim > 1 and transposed(owner.module):
        outputs, inputs = inputs, outputs
    if owner.style == "embedding_rowwise":
        return Shard(0)
    if owner.style == "packed_colwise" and not down:
        return packed(outputs, 2)
    if owner.style in COLUMNS and not down:
        return Shard(outputs)
    if owner.style in ROWS and not up and parameter.ndim > 1:
        return packed(inputs, 2) if owner.style == "packed_rowwise" else Shard(inputs)
    return Replicate()


def place_parameters(model: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Any]) -> None:
    """Replace each parameter on the meta device by a DTensor, also on the meta device."""

    def sharded(name: str, whole: nn.Parameter) -> Tensor:
        placement, own = placements[name], [*whole.shape]
        if (dim := sharded_dim(placement)) is not None:  # by the rule of torch.chunk
            parts = packed_parts(placement)
            own[dim] = len(own_chunk(own[dim] // parts, mesh)) * parts
        part = torch.empty(own, dtype=whole.dtype, device="meta")
        shape, stride = whole.shape, whole.stride()
        return DTensor.from_local(
            part, mesh, [placement], run_check=False, shape=shape, stride=stride
        )

    replace_parameters(model, sharded)


def replace_parameters(module: nn.Module, changed: Callable[[str, nn.Parameter], Tensor]) -> None:
    """Replace each parameter by what `changed` makes of its name and itself: one of other values,
    or a parameter. Tied ones stay one object."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if parameter not in made:
            value = changed(name, parameter)
            made[parameter] = (
                value
                if isinstance(value, nn.Parameter)
                else nn.Parameter(value, requires_grad=parameter.requires_grad)
            )
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._parameters[leaf] = made[parameter]


Wholes = Mapping[str, DTensor]
"""Name of each parameter -> the DTensor that it was, on the meta device."""


def take_parts(module: nn.Module) -> Wholes:
    """Replace each parameter, a DTensor on the meta device, by this rank's part of it, also on the
    meta device. Tied ones stay one object."""
    wholes: dict[str, DTensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        assert isinstance(parameter.data, DTensor)
        wholes[name] = parameter.data
    replace_parameters(module, lambda _, parameter: parameter.data.to_local())  # type: ignore[attr-defined]
    return wholes


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
