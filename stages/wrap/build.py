"""The one way from a model source to a module that can be trained, and the check of what came out.

A strategy parametrises `build_module` by how it shards; the rest is the same for all.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline import (
    IN_DISPLAY,
    Context,
    Engine,
    EngineMismatch,
    ModelSource,
    NamedParameter,
    OptimizerPlan,
    Precision,
    dtype_name,
    torch_dtype,
)
from pipeline.hardware import model_begins
from pipeline.utils import replace_text, with_values
from stages.model.declared import FrozenSource, logical_numel, outline
from stages.wrap.compute_cast import cast_on_use
from stages.wrap.load_weights import load_weights, local_shards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def source_of(model: ModelSource, plan: OptimizerPlan) -> ModelSource:
    """The model as an engine has it: without an optimizer, none of it is trained."""
    return model if plan.parts else FrozenSource(model)


def build_module(
    ctx: Context,
    model: ModelSource,
    precision: Precision,
    *,
    shard: Callable[[nn.Module], None] | None = None,
    replicas: ProcessGroup | None = None,
    home: torch.device | None = None,
    casts: bool = False,
) -> nn.Module:
    """Build the model, shard it, materialize it and load its weights.

    `shard` shards the module in place while its parameters are on the meta device. `replicas` are
    the ranks that hold the same shards and share the reading; without, each rank reads its own.
    Parameters live on `home`, buffers on the run's device, which is the default of `home`. With
    `casts`, modules compute in the compute dtype; a strategy that casts by itself needs none.
    Raises StageError for weights that do not fit the model.
    """
    shards = [shard or (lambda module: None)]
    (module,) = build_modules(ctx, model, precision, shards, replicas=replicas, home=home)
    if casts:
        cast_on_use(module, torch_dtype(precision.compute))
    return module


def build_modules(
    ctx: Context,
    model: ModelSource,
    precision: Precision,
    shards: Sequence[Callable[[nn.Module], None]],
    *,
    replicas: ProcessGroup | None = None,
    home: torch.device | None = None,
) -> list[nn.Module]:
    """Build the model once for each of `shards`, which makes it a part of the model, as
    `build_module` does it."""
    device = ctx.dist.device
    # Opened first: this compares the weights with the model.
    with contextlib.closing(model.weights()) as reader:
        modules = []
        for shard in shards:
            module = build_empty(model, precision)
            with with_values():
                shard(module)
            materialize(module, home or device, buffer_device=device)
            modules.append(module)
        own = itertools.chain.from_iterable(map(local_shards, modules))
        load_weights(own, reader, ctx, replicas)
    for module in modules:
        cast_buffers(module, precision)
    return modules


def build_empty(model: ModelSource, precision: Precision) -> nn.Module:
    """The model with parameters on the meta device in the master dtype, those of the frozen base in
    the compute dtype, and real buffers.

    Packed bytes are declared in that dtype too, as engines send and gather tensors of one dtype
    together.
    """
    with with_values():
        module = outline(model)
        model_begins()  # importing the model's code does not count as building it
        frozen_base = set(model.frozen_base)
        for name, parameter in module.named_parameters():
            dtype = torch_dtype(precision.compute if name in frozen_base else precision.master)
            packed = parameter.dtype == torch.uint8
            parameter.data = parameter.data.view(dtype) if packed else parameter.data.to(dtype)
    module.train()
    return module


def materialize(module: nn.Module, device: torch.device, *, buffer_device: torch.device) -> None:
    """Give every meta parameter real, uninitialised storage on `device`; move buffers.

    Tied parameters stay one object, which `nn.Module.to_empty` does not promise.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                owner._parameters[name] = made[parameter]
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(buffer_device)


def cast_buffers(module: nn.Module, precision: Precision) -> None:
    """Cast every floating buffer to the policy's buffer dtype; None keeps the model's own."""
    if precision.buffer is None:
        return
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(torch_dtype(precision.buffer))


def declared_facts(ctx: Context, precision: Precision) -> dict[str, Any]:
    """World size and dtypes that every engine's description must have, by the recipe alone."""
    buffers = {"buffers": [precision.buffer]} if precision.buffer else {}
    return {
        "world_size": ctx.dist.world_size,
        "master": [precision.master],
        "compute": [precision.compute],
        "reduce": [precision.reduce],
        **buffers,
    }


def verify_engine(ctx: Context, engine: Engine, expected: Mapping[str, Any]) -> None:
    """Write the engine's description to `ctx.engine_file`, log it, and compare it with `expected`.

    `engine.describe()` is read off the live objects; `expected` follows from the recipe alone.
    Raises EngineMismatch on every rank where they differ, naming each difference.
    """
    facts = dict(engine.describe())
    if not facts.get("trained_parameters", True):  # then there are neither masters nor gradients
        expected = {k: v for k, v in expected.items() if k not in ("master", "reduce")}
    differences = [
        f"{key}: asked for {value!r}, found {facts.get(key)!r}"
        for key, value in expected.items()
        if facts.get(key) != value
    ]
    if ctx.dist.is_main:
        replace_text(ctx.engine_file, json.dumps(facts, indent=1) + "\n")
    ctx.log.info("running: %s", json.dumps(facts), extra=IN_DISPLAY)
    if differences:
        raise EngineMismatch("what runs is not what the recipe asks for: " + "; ".join(differences))


def named_parameters(module: nn.Module) -> Iterator[NamedParameter]:
    """The module's parameters, tied ones once, as an OptimizerPlan groups them."""
    for name, parameter in module.named_parameters():
        kind = type(module.get_submodule(name.rpartition(".")[0]))
        shape, shard = tuple(parameter.shape), shard_number(parameter)
        yield NamedParameter(name, parameter, shape, shard, kind)


def named_parts(whole: nn.Module, parts: Iterable[nn.Module]) -> list[NamedParameter]:
    """The parameters of the whole model; those of other ranks are without memory."""
    here = {name: one for part in parts for name, one in part.named_parameters()}
    found = []
    for one in named_parameters(whole):
        parameter = here.get(one.name, one.parameter)
        found.append(one._replace(parameter=parameter, shard=shard_number(parameter)))
    return found


def shard_number(parameter: nn.Parameter) -> int:
    """Number of this process among those that share a sharded parameter; replicas have the same."""
    number = 0
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                number = number * mesh.size(axis) + mesh.get_local_rank(axis)
    return number


def trained(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that the optimizer updates."""
    return (parameter for parameter in module.parameters() if parameter.requires_grad)


def parameter_count(
    module: nn.Module, elements: Callable[[nn.Parameter], int] = nn.Parameter.numel
) -> int:
    """Number of the model's weights, tied ones once, however they are packed or sharded."""
    known = logical_numel(module)
    named = module.named_parameters()
    return sum(known.get(name) or elements(parameter) for name, parameter in named)


def dtype_names(tensors: Iterable[Tensor]) -> list[str]:
    """The distinct floating dtypes among `tensors`, as a recipe spells them, sorted."""
    return sorted({dtype_name(t.dtype) for t in tensors if t.is_floating_point()})
