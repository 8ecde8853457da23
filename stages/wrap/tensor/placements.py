"""The part of each parameter that a tensor-parallel rank has, as a placement of DTensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
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
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        if parameter not in made:
            part = torch.empty(
                local_shape(parameter.shape, placements[name], mesh),
                dtype=parameter.dtype,
                device="meta",
            )
            sharded = DTensor.from_local(
                part,
                mesh,
                [placements[name]],
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            made[parameter] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        model.get_submodule(owner)._parameters[leaf] = made[parameter]


def local_shape(shape: torch.Size, placement: Any, mesh: DeviceMesh) -> torch.Size:
    """Shape of this rank's part, by the rule of torch.chunk."""
    dim = sharded_dim(placement)
    if dim is None:
        return shape
    parts = packed_parts(placement)
    own = len(own_chunk(shape[dim] // parts, mesh)) * parts
    return torch.Size([*shape[:dim], own, *shape[dim + 1 :]])
