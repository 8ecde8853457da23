"""Engine of wrap.fsdp: meshes, module, optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from pipeline import Context, ModelSource, OptimizerPlan, Precision, StageError
from pipeline.utils import local_part, with_values
from stages.wrap.axes import Axes, required
from stages.wrap.build import build_module, declared_facts, source_of, verify_engine
from stages.wrap.context.attention import divide_sequence
from stages.wrap.fsdp_units import DATA_AXES, UnitDivider
from stages.wrap.gradients import total_norm
from stages.wrap.mesh import expert_mesh, parameter_mesh, warn_of_slow_groups
from stages.wrap.optimizer_groups import make_optimizers
from stages.wrap.passes import ModulePasses
from stages.wrap.pipeline.ties import TiedEmbedding
from stages.wrap.torch_compat import reshard, sharding_facts
from stages.wrap.torch_engine import TorchEngine

if TYPE_CHECKING:
    from stages.wrap.fsdp import Fsdp


def build(
    config: Fsdp, ctx: Context, model: ModelSource, precision: Precision, plan: OptimizerPlan
) -> TorchEngine:
    """Shard units then the root on the meta device; each rank materializes and loads its shards."""
    axes, model = required(config, ctx.dist.world_size), source_of(model, plan)
    with with_values():
        mesh, experts = _meshes(config, ctx, axes)
    divider = UnitDivider(config, model, precision, mesh, experts)
    engine: FsdpEngine
    if axes.pipeline > 1:
        from stages.wrap.fsdp_pipeline import build_pipeline

        engine = build_pipeline(config, ctx, model, precision, plan, divider, mesh, axes)
    else:
        module = build_module(ctx, model, precision, shard=divider, **places(config, divider))
        group = divide_sequence(module, axes, ctx.dist.device.type)
        passes = ModulePasses(module, model.scorer(module, group=group), ctx.dist, axes)
        optimizers = make_optimizers(plan, module)
        engine = FsdpEngine(config, mesh, passes, optimizers, precision, plan)
    expected = {
        **declared_facts(ctx, precision),
        "engine": "fully_shard",
        "mesh": mesh_facts(config, mesh),
        "units": len(divider.units),
        "reshard_after_forward": sorted(divider.reshard_after_forward) or [False],
        "device": "cpu" if config.cpu_offload else ctx.dist.device.type,
        "cpu_offload": config.cpu_offload,
    }
    verify_engine(ctx, engine, expected)
    return engine


def _meshes(config: Fsdp, ctx: Context, axes: Axes) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The mesh of the parameters, and of experts, None if they are not divided. Raises StageError
    for shards that do not divide the ranks, or do not divide among the ranks of experts."""
    both, device = axes.data * axes.context, ctx.dist.device.type
    shards = config.shards(axes, ctx.dist.local_world_size)
    if both % shards:
        raise StageError(f"{both} processes do not divide into shard groups of {shards}")
    warn_of_slow_groups(ctx, axes)
    mesh, asked = parameter_mesh(axes, device, shards), config.expert_parallel
    if asked is None or asked.size == 1:
        return mesh, None
    if shards % asked.size:
        raise StageError(f"expert_parallel: {shards} shards do not divide among {asked.size} ranks")
    return mesh, expert_mesh(axes, device, shards, asked.size)


def mesh_facts(config: Fsdp, mesh: DeviceMesh) -> dict[str, int]:
    """Sizes of the axes that a recipe asks for."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    always = DATA_AXES[config.sharding]
    return {name: size for name, size in sizes.items() if size > 1 or name in always}


def places(config: Fsdp, divider: UnitDivider) -> dict[str, Any]:
    """Keyword arguments of `build_module`: the ranks that share the reading of weights, and the
    device of parameters."""
    mesh = divider.data_mesh
    return {
        "replicas": mesh["replicate"].get_group() if mesh.ndim == 2 else None,
        "home": torch.device("cpu") if config.cpu_offload else None,
    }


class FsdpEngine(TorchEngine):
    """Shards on every rank; parameters gathered unit by unit, gradients reduce-scattered."""

    def __init__(
        self, config: Fsdp, mesh: DeviceMesh, *rest: Any, tied: TiedEmbedding | None = None
    ) -> None:
        """`tied`: the embedding's copies on the stages of a pipeline."""
        super().__init__(*rest)
        self._mesh, self._tied = mesh_facts(config, mesh), tied
        self._reduce_always = config.reduce_every_microbatch

    @contextlib.contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        (root,) = self.parts
        assert isinstance(root, FSDPModule)
        reduces = last or self._reduce_always
        root.set_requires_gradient_sync(reduces)
        # Otherwise the buffer of the root's gradients stays through the next forward.
        root.set_is_last_backward(reduces)
        yield

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        repeated = None
        if self._tied is not None:
            self._tied.sum_gradients()
            repeated = self._tied.repeated
        copy = None if repeated is None else repeated.grad
        divided = self.passes.axes.pipeline > 1
        return total_norm([one for one in gradients if one is not copy], divided=divided)

    def to_sharded(self) -> None:
        for part in self.parts:
            reshard(part)

    def describe(self) -> Mapping[str, Any]:
        self.to_sharded()
        return {
            "engine": "fully_shard" if isinstance(self.parts[0], FSDPModule) else "none",
            **self.common_facts(),
            "mesh": self._mesh,
            **sharding_facts(self.parts),
            "sharded_parameters": sum(
                local_part(one).numel() for part in self.parts for one in part.parameters()
            ),
        }
