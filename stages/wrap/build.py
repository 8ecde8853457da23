"""From a model source to a module that can be trained, and the check of the engine made of it.

A strategy passes `build_module` its way of sharding; the rest is the same for all.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    Precision,
    dtype_name,
    torch_dtype,
)
from pipeline.hardware import model_begins
from pipeline.utils import replace_text, with_values
from stages.model.block_changes import around_forward, hooks_before
from stages.model.declared import logical_numel, outline
from stages.wrap.shards import load_weights, weights_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def build_module(
    ctx: Context, model: ModelSource, precision: Precision, *,
    shard: Callable[[nn.Module], None] | None = None, replicas: ProcessGroup | None = None,
    home: torch.device | None = None, casts: bool = False,
) -> nn.Module:  # fmt: skip
    """Build the model, shard it, materialize it and load its weights.

    `shard` shards the module in place, or makes it a part of the model, while its parameters are on
    the meta device. `replicas` are the ranks that hold the same shards and share the reading;
    without, each rank reads its own. Parameters live on `home`, buffers on the run's device, which
    is the default of `home`. With `casts`, modules compute in the compute dtype; a strategy that
    casts by itself needs none. Raises StageError for weights that do not fit the model."""
    device = ctx.dist.device
    # Opened first: this compares the weights with the model.
    with contextlib.closing(model.weights()) as reader:
        module = build_empty(model, precision)
        if shard is not None:
            with with_values():
                shard(module)
        materialize(module, home or device, precision, buffer_device=device)
        load_weights(weights_of(module), reader, ctx, replicas)
    if casts:
        cast_on_use(module, torch_dtype(precision.compute))
    return module


def build_empty(model: ModelSource, precision: Precision) -> nn.Module:
    """The model with real buffers and parameters on the meta device, in the master dtype or, of the
    frozen base, the compute dtype. Packed bytes are declared in that dtype too, as engines send and
    gather tensors of one dtype together."""
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


def materialize(
    module: nn.Module, device: torch.device, precision: Precision, *, buffer_device: torch.device
) -> None:
    """Give every meta parameter uninitialised storage on `device`; move buffers, and cast floating
    ones to the policy's buffer dtype. None keeps the model's own."""
    replace_parameters(
        module, lambda _, one: torch.empty_like(one, device=device) if one.is_meta else one
    )
    dtype = None if precision.buffer is None else torch_dtype(precision.buffer)
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                cast = dtype if buffer.is_floating_point() else None
                owner._buffers[name] = buffer.to(buffer_device, cast)


def replace_parameters(module: nn.Module, changed: Callable[[str, nn.Parameter], Tensor]) -> None:
    """Replace each parameter by what `changed` makes of its name and itself: one of other values,
    or a parameter. Tied ones stay one object."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if parameter not in made:
            value = changed(name, parameter)
            if not isinstance(value, nn.Parameter):
                value = nn.Parameter(value, requires_grad=parameter.requires_grad)
            made[parameter] = value
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._parameters[leaf] = made[parameter]


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def cast_on_use(model: nn.Module, dtype: torch.dtype) -> None:
    """Let modules run forward and backward in the compute dtype `dtype`, with parameters and
    gradients in the master dtype.

    Every module sees its own parameters cast, as sharding strategies cast when they gather. Unlike
    under autocast, no operator keeps another dtype, so a policy means the same with and without
    sharding. Activation checkpointing repeats the cast with a module's forward. A module also sees
    its children's parameters cast, as some read them, but not its grandchildren's."""

    def visible(module: nn.Module) -> Iterator[nn.Module]:
        """The module and its children, and children of a container, which nothing calls."""
        yield module
        for child in module.children():
            yield from visible(child) if isinstance(child, CONTAINERS) else [child]

    for module in model.modules():
        if not isinstance(module, CONTAINERS):
            cast = ParameterCast(dtype, list(visible(module)))
            if cast.differing():
                around_forward(module, cast, cast.undo)


@dataclass(eq=False)
class ParameterCast:
    """Forward pre-hook that casts the parameters of `owners` for the time of a forward. Cast
    tensors take the places of the parameters, where a module finds them. One that a caller's hook
    has put there is used, and left in place."""

    dtype: torch.dtype
    owners: Sequence[nn.Module]
    _replaced: list[list[tuple[nn.Module, str, nn.Parameter]]] = field(default_factory=list)

    def differing(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Floating parameters of another dtype, each with its owner and its name there."""
        return [
            (owner, name, one)
            for owner in self.owners
            for name, one in owner._parameters.items()
            if one is not None and one.is_floating_point() and one.dtype != self.dtype
        ]

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._replaced.append(self.differing())
        for owner, name, parameter in self._replaced[-1]:
            owner._parameters[name] = parameter.to(self.dtype)  # type: ignore[assignment]

    def undo(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook that puts back the parameters of the latest forward."""
        for owner, name, parameter in self._replaced.pop() if self._replaced else ():
            owner._parameters[name] = parameter


def installed_casts(model: nn.Module) -> list[ParameterCast]:
    """The casts on the model's modules."""
    hooks = [hook for module in model.modules() for hook in hooks_before(module)]
    return [hook for hook in hooks if isinstance(hook, ParameterCast)]


def declared_facts(ctx: Context, precision: Precision) -> dict[str, Any]:
    """World size and dtypes of any engine's description, by the recipe only."""
    facts: dict[str, Any] = {
        "world_size": ctx.dist.world_size,
        "master": [precision.master],
        "compute": [precision.compute],
        "reduce": [precision.reduce],
    }
    return facts | ({"buffers": [precision.buffer]} if precision.buffer else {})


def verify_engine(ctx: Context, engine: Engine, expected: Mapping[str, Any]) -> None:
    """Write the engine's description, which is read off the live objects, to `ctx.engine_file`, and
    log it. Raises EngineMismatch on every rank where it differs from `expected`, which follows from
    the recipe only, naming each difference."""
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


def named_parameters(
    whole: nn.Module, parts: Iterable[nn.Module] | None = None
) -> Iterator[NamedParameter]:
    """The model's parameters, tied ones once, as an OptimizerPlan groups them. Where ranks have
    parts of the model, this one `parts`, parameters of other ranks are without memory."""
    here = {name: one for part in parts or () for name, one in part.named_parameters()}
    for name, parameter in whole.named_parameters():
        kind = type(whole.get_submodule(name.rpartition(".")[0]))
        own, number = here.get(name, parameter), 0
        if isinstance(own, DTensor):
            mesh = own.device_mesh
            for axis, placement in enumerate(own.placements):
                if not placement.is_replicate():  # replicas have the same number
                    number = number * mesh.size(axis) + mesh.get_local_rank(axis)
        yield NamedParameter(name, own, tuple(parameter.shape), number, kind)


def parameter_count(
    module: nn.Module, shape: Callable[[nn.Parameter], Sequence[int]] = lambda one: one.shape
) -> int:
    """Number of the model's weights, tied ones once, however they are packed or sharded."""
    known = logical_numel(module)
    return sum(known.get(name) or math.prod(shape(one)) for name, one in module.named_parameters())


def dtype_names(tensors: Iterable[Tensor]) -> list[str]:
    """The distinct floating dtypes among `tensors`, as a recipe spells them, sorted."""
    return sorted({dtype_name(t.dtype) for t in tensors if t.is_floating_point()})
