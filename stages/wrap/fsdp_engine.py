"""Engine of wrap.fsdp: meshes, module, optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from pipeline import Context, ModelSource, OptimizerPlan, Precision, StageError
from pipeline.utils import local_part, with_values
from stages.wrap.axes import required
from stages.wrap.build import build_module, declared_facts, source_of, verify_engine
from stages.wrap.context.attention import divide_sequence
from stages.wrap.fsdp_units import DATA_AXES, UnitDivider
from stages.wrap.gradients import total_norm
from stages.wrap.mesh import expert_mesh, parameter_mesh, warn_of_slow_groups
from stages.wrap.optimizer_groups import make_optimizers
from stages.wrap.passes import ModulePasses, Passes
from stages.wrap.pipeline.ties import TiedEmbedding
from stages.wrap.torch_compat import reshard, sharding_facts
from stages.wrap.torch_engine import TorchEngine

if TYPE_CHECKING:
    from stages.wrap.fsdp import Fsdp


def build(
    config: Fsdp, ctx: Context, model: ModelSource, precision: Precision, plan: OptimizerPlan
) -> TorchEngine:
    """Shard units then the root on the meta device; each rank materializes and loads its shards.
    Raises StageError for shards that do not divide the ranks, or do not divide among the ranks of
    experts."""
    axes, model = required(config, ctx.dist.world_size), source_of(model, plan)
    both, device = axes.data * axes.context, ctx.dist.device.type
    shards = config.shards(axes, ctx.dist.local_world_size)
    if both % shards:
        raise StageError(f"{both} processes do not divide into shard groups of {shards}")
    among = 1 if config.expert_parallel is None else config.expert_parallel.size
    if shards % among:
        raise StageError(f"expert_parallel: {shards} shards do not divide among {among} ranks")
    warn_of_slow_groups(ctx, axes)
    with with_values():
        mesh = parameter_mesh(axes, device, shards)
        experts = expert_mesh(axes, device, shards, among) if among > 1 else None
    divider = UnitDivider(config, model, precision, mesh, experts)
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    always = DATA_AXES[config.sharding]
    facts = {name: size for name, size in sizes.items() if size > 1 or name in always}
    passes: Passes
    whole: nn.Module | None = None
    tied: TiedEmbedding | None = None
    if axes.pipeline > 1:
        from stages.wrap.fsdp_pipeline import build_stages

        passes, optimizers, whole, tied = build_stages(
            config, ctx, model, precision, plan, divider, mesh, axes
        )
    else:
        module = build_module(ctx, model, precision, shard=divider, **divider.places)
        group = divide_sequence(module, axes, device)
        passes = ModulePasses(module, model.scorer(module, group=group), ctx.dist, axes)
        optimizers = make_optimizers(plan, module)
    engine = FsdpEngine(config, facts, passes, optimizers, precision, plan, whole, tied=tied)
    expected = {
        **declared_facts(ctx, precision),
        "engine": "fully_shard",
        "mesh": facts,
        "units": len(divider.units),
        "reshard_after_forward": sorted(divider.reshard_after_forward) or [False],
        "device": "cpu" if config.cpu_offload else device,
        "cpu_offload": config.cpu_offload,
    }
    verify_engine(ctx, engine, expected)
    return engine


class FsdpEngine(TorchEngine):
    """Shards on every rank; parameters gathered unit by unit, gradients reduce-scattered."""

    def __init__(
        self, config: Fsdp, mesh: Mapping[str, int], *rest: Any, tied: TiedEmbedding | None = None
    ) -> None:
        """`mesh` has the sizes of the axes that a recipe asks for, `tied` the embedding's copies on
        the stages of a pipeline."""
        super().__init__(*rest)
        self._mesh, self._tied = mesh, tied
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
        copy = None
        if self._tied is not None:
            self._tied.sum_gradients()
            copy = None if self._tied.repeated is None else self._tied.repeated.grad
        divided = self.passes.axes.pipeline > 1
        return total_norm([one for one in gradients if one is not copy], divided=divided)

    def to_sharded(self) -> None:
        for part in self.parts:
            reshard(part)

    def describe(self) -> Mapping[str, Any]:
        self.to_sharded()
        own = (local_part(one) for part in self.parts for one in part.parameters())
        return {
            "engine": "fully_shard" if isinstance(self.parts[0], FSDPModule) else "none",
            **self.common_facts(),
            "mesh": self._mesh,
            **sharding_facts(self.parts),
            "sharded_parameters": sum(one.numel() for one in own),
        }
