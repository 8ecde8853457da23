"""The live half of wrap.fsdp."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from pipeline import Context, ModelSource, OptimizerPlan, Precision, StageError, torch_dtype
from pipeline.utils import with_values
from stages.wrap.axes import Axes, required
from stages.wrap.build import build_module, declared_facts, verify_engine
from stages.wrap.context.attention import divide_sequence
from stages.wrap.mesh import parameter_mesh
from stages.wrap.tensor.divide import divide_layers
from stages.wrap.torch_compat import reshard, sharding_facts
from stages.wrap.torch_engine import TorchEngine, make_optimizer

if TYPE_CHECKING:
    from stages.wrap.fsdp import Fsdp


DATA_AXES: dict[str, Any] = {
    "full_shard": "shard",
    "shard_grad_op": "shard",
    "hybrid_shard": ("replicate", "shard"),
    "no_shard": ("replicate", "shard"),
}
"""Axes of the mesh over which each kind of sharding works."""


def build(
    config: Fsdp, ctx: Context, model: ModelSource, precision: Precision, plan: OptimizerPlan
) -> TorchEngine:
    """Shard units then the root on the meta device; each rank materializes and loads its shards."""
    axes = required(config, ctx.dist.world_size)
    with with_values():
        whole = make_mesh(config, ctx, axes)
    mesh = whole[DATA_AXES[config.sharding]]
    units: list[nn.Module] = []

    def shard(module: nn.Module) -> None:
        if config.tensor_parallel is not None and axes.tensor > 1:
            divide_layers(config.tensor_parallel, module, model.blocks(module), whole["tensor"])
        units.extend(choose_units(config, module, model.blocks(module)))
        _shard(config, [*units, module], mesh, precision)
        _prefetch(config, units)

    module = build_module(
        ctx,
        model,
        precision,
        shard=shard,
        replicas=mesh["replicate"].get_group() if mesh.ndim == 2 else None,
        home=torch.device("cpu") if config.cpu_offload else None,
    )
    divide_sequence(module, axes, ctx.dist.device.type)
    optimizer = make_optimizer(plan, module)
    engine = FsdpEngine(config, mesh, module, optimizer, ctx, precision, plan, axes)
    expected = {
        **declared_facts(ctx, precision),
        "engine": "fully_shard",
        "mesh": dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)),
        "units": len(units) + 1,
        "reshard_after_forward": [_reshards(config) and bool(units)],
        "device": "cpu" if config.cpu_offload else ctx.dist.device.type,
        "cpu_offload": config.cpu_offload,
    }
    verify_engine(ctx, engine, expected)
    return engine


def make_mesh(config: Fsdp, ctx: Context, axes: Axes) -> DeviceMesh:
    """The mesh of the parameters. Raises StageError for shards that do not divide the ranks."""
    both = axes.data * axes.context
    shards = config.shards(axes, ctx.dist.local_world_size)
    if both % shards:
        raise StageError(f"{both} processes do not divide into shard groups of {shards}")
    return parameter_mesh(axes, ctx.dist.device.type, shards)


def _shard(
    config: Fsdp, units: Sequence[nn.Module], mesh: DeviceMesh, precision: Precision
) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch_dtype(precision.compute), reduce_dtype=torch_dtype(precision.reduce)
    )
    offload = OffloadPolicy()
    if config.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=config.pin_memory and mesh.device_type == "cuda")
    # None reshards every unit but the root, which backward needs at once.
    reshard = None if _reshards(config) else False
    for unit in units:
        fully_shard(
            unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload
        )


def _prefetch(config: Fsdp, units: Sequence[nn.Module]) -> None:
    sharded: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for place, unit in enumerate(sharded):
        if config.forward_prefetch:
            unit.set_modules_to_forward_prefetch(sharded[place + 1 :][: config.forward_prefetch])
        if config.backward_prefetch != 1:
            before = sharded[:place][::-1]
            unit.set_modules_to_backward_prefetch(before[: config.backward_prefetch])


def _reshards(config: Fsdp) -> bool:
    """Whether units are gathered for forward, and again for backward."""
    return config.sharding in ("full_shard", "hybrid_shard")


class FsdpEngine(TorchEngine):
    """Shards on every rank; parameters gathered unit by unit, gradients reduce-scattered."""

    def __init__(self, config: Fsdp, mesh: DeviceMesh, *rest: Any) -> None:
        super().__init__(*rest)
        self._mesh = mesh
        self._reduce_always = config.reduce_every_microbatch

    @property
    def module(self) -> nn.Module:
        return self.model

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        assert isinstance(self.model, FSDPModule)
        reduces = last or self._reduce_always
        self.model.set_requires_gradient_sync(reduces)
        # Otherwise the buffer of the root's gradients stays through the next forward.
        self.model.set_is_last_backward(reduces)
        yield

    def to_sharded(self) -> None:
        reshard(self.model)

    def describe(self) -> Mapping[str, Any]:
        self.to_sharded()
        return {
            "engine": "fully_shard" if isinstance(self.model, FSDPModule) else "none",
            **self.common_facts(),
            "mesh": dict(zip(self._mesh.mesh_dim_names or (), self._mesh.shape, strict=True)),
            **sharding_facts(self.model),
            "sharded_parameters": sum(p.to_local().numel() for p in self.model.parameters()),  # type: ignore[attr-defined]
        }


def choose_units(config: Fsdp, module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The units in forward order, inner before outer, without the root.

    Raises StageError if the recipe's choice finds none in this model, or separates tied weights.
    """
    if config.units == "block":
        units, what = list(blocks), "transformer blocks; name their classes in `units`"
    else:
        named = set(config.units)
        units = [m for m in _inner_first(module) if type(m).__name__ in named]
        what = f"modules of class {', '.join(sorted(named))}"
    if not units:
        raise StageError(f"{type(module).__name__} has no {what}")
    owners = _owners(module)
    for unit in units:
        if not _closed(unit, owners):
            raise StageError(
                f"{type(unit).__name__} shares a weight with a module outside of it",
                hint="choose units that hold all owners of a tied weight, or none",
            )
    return units


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    """Every module below `module`, children before their parents."""
    for child in module.children():
        yield from _inner_first(child)
        yield child


def _owners(module: nn.Module) -> dict[nn.Parameter, set[nn.Module]]:
    owners: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners[parameter].add(owner)
    return owners


def _closed(unit: nn.Module, owners: dict[nn.Parameter, set[nn.Module]]) -> bool:
    """Whether `unit` holds all owners of its weights; torch gathers a weight in one unit."""
    inside = set(unit.modules())
    return all(owners[parameter] <= inside for parameter in unit.parameters())
