"""The live half of wrap.fsdp: divides the layers of a model on the meta device, then its units; and
makes an engine of it, or of its stages in a pipeline."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from pipeline import Context, ModelSource, OptimizerPlan, Precision, StageError, torch_dtype
from pipeline.utils import local_part
from stages.model.declared import FrozenSource, outline
from stages.wrap.axes import (
    FOLDED,
    Axes,
    layer_ranges,
    parameter_mesh,
    required,
    stages_of,
    warn_of_slow_groups,
)
from stages.wrap.build import build_module, declared_facts, verify_engine
from stages.wrap.context_compat import divide_sequence
from stages.wrap.experts_compat import divide_experts
from stages.wrap.optimizer_state import make_optimizers
from stages.wrap.pipeline_split import Absent, TiedEmbedding, is_tied, keep_layers
from stages.wrap.tensor_divide import divide_layers
from stages.wrap.tensor_plan import TensorPlan
from stages.wrap.torch_compat import sharding_facts
from stages.wrap.torch_engine import ModulePasses, Passes, TorchEngine, total_norm

if TYPE_CHECKING:
    from stages.wrap.fsdp import Fsdp

DATA_AXES = {
    "full_shard": ("shard",),
    "shard_grad_op": ("shard",),
    "hybrid_shard": ("replicate", "shard"),
    "no_shard": ("replicate", "shard"),
}
"""Axes of the mesh over which each kind of sharding works."""


def build(
    config: Fsdp, ctx: Context, model: ModelSource, precision: Precision, plan: OptimizerPlan
) -> TorchEngine:
    """Shard units then the root on the meta device; each rank materializes and loads its shards.
    Raises StageError for shards that do not divide the ranks, or do not divide among the ranks of
    experts."""
    model = model if plan.parts else FrozenSource(model)
    axes, device = required(config, ctx.dist.world_size), ctx.dist.device.type
    both = axes.data * axes.context
    shards = config.shards(axes, ctx.dist.local_world_size)
    if both % shards:
        raise StageError(f"{both} processes do not divide into shard groups of {shards}")
    among = 1 if config.expert_parallel is None else config.expert_parallel.size
    if shards % among:
        raise StageError(f"expert_parallel: {shards} shards do not divide among {among} ranks")
    warn_of_slow_groups(ctx, axes)
    mesh = parameter_mesh(axes, device, shards)
    experts = parameter_mesh(axes, device, shards, among) if among > 1 else None
    divider = UnitDivider(config, model, precision, mesh, experts)
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    always = DATA_AXES[config.sharding]
    facts = {name: size for name, size in sizes.items() if size > 1 or name in always}
    places: dict[str, Any] = {
        "replicas": mesh["replicate"].get_group() if "replicate" in always else None,
        "home": torch.device("cpu") if config.cpu_offload else None,
    }
    passes: Passes
    tied: TiedEmbedding | None = None
    if axes.pipeline > 1:
        passes, whole, tied = _stages(ctx, model, precision, divider, places, axes, plan)
    else:
        whole = build_module(ctx, model, precision, shard=divider, **places)
        group = divide_sequence(whole, axes, device)
        passes = ModulePasses(whole, model.scorer(whole, group=group), ctx.dist, axes)
    optimizers = make_optimizers(plan, whole, passes.parts)
    rest = passes, optimizers, precision, plan, whole
    engine = FsdpEngine(facts, tied, config.reduce_every_microbatch, *rest)
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


def _stages(
    ctx: Context, model: ModelSource, precision: Precision, divider: UnitDivider,
    places: Mapping[str, Any], axes: Axes, plan: OptimizerPlan,
) -> tuple[Passes, nn.Module, TiedEmbedding | None]:  # fmt: skip
    """Cut this rank's stages out of the model, divide each, and load them in their `places`
    (collective); returns them with the whole model on the meta device, and with the copies of a
    tied embedding. Raises StageError for a model that does not divide into stages, for a tied
    embedding whose two stages would be on one rank, and if nothing is trained on this rank or in
    the first stage, as backward begins with an output that needs a gradient."""
    from stages.wrap.pipeline_compat import PipelinePasses, Stage

    asked = divider.config.pipeline_parallel
    assert asked is not None
    whole: Any = outline(model)
    blocks, tied = model.blocks(whole), is_tied(whole)
    if asked.schedule in FOLDED and tied:
        raise StageError(
            f"pipeline_parallel: {asked.schedule} puts the first and the last stage on one rank, "
            "and this model's head shares the embedding's weight",
            hint="choose another schedule",
        )
    if divider.config.tensor_parallel is not None:
        TensorPlan(divider.config.tensor_parallel, whole, blocks)
    head = whole.get_input_embeddings().weight.numel()
    block = sum(parameter.numel() for parameter in blocks[0].parameters())
    group, count = divider.mesh["pipeline"].get_group(), asked.size * asked.per_rank
    folded, stages = asked.schedule in FOLDED, dict[int, Stage]()
    ranges = layer_ranges(len(blocks), count, head, block)

    def make(module: nn.Module, *, number: int) -> None:
        keep_layers(module, ranges[number])
        first, last = number == 0, number == count - 1
        dtype, beat = torch_dtype(precision.compute), ctx.dist.heartbeat.beat
        stages[number] = Stage(module, first=first, last=last, dtype=dtype, beat=beat)
        divider(module)

    numbers = stages_of(group.rank(), asked.size, asked.per_rank, folded=folded)
    modules = [
        build_module(ctx, model, precision, shard=functools.partial(make, number=number), **places)
        for number in numbers
    ]
    for stage in stages.values():
        among = divide_sequence(stage.module, axes, ctx.dist.device.type)
        if stage.last:
            stage.scorer = model.scorer(stage.module, group=among, forward=stage.forward)
    width = whole.config.get_text_config().hidden_size
    passes = PipelinePasses(asked, group, stages, width, ctx.dist, axes)
    trains = [any(one.requires_grad for one in module.parameters()) for module in modules]
    if plan.parts and (not any(trains) or (0 in stages and not trains[0])):
        raise StageError(
            "pipeline_parallel: none of the trained weights are in this rank's blocks",
            hint="train weights in all blocks, or leave pipeline_parallel out",
        )
    if not tied:
        return passes, whole, None
    first, last = (
        stages[number].module.get_input_embeddings().weight if number in stages else None
        for number in (0, count - 1)
    )
    return passes, whole, TiedEmbedding(group, first, last)


class FsdpEngine(TorchEngine):
    """Shards on every rank; parameters gathered unit by unit, gradients reduce-scattered."""

    def __init__(
        self, mesh: Mapping[str, int], tied: TiedEmbedding | None, reduce_always: bool, *rest: Any
    ) -> None:
        """`mesh` has the sizes of the axes that a recipe asks for, `tied` the embedding's copies on
        the stages of a pipeline."""
        super().__init__(*rest)
        self._mesh, self._tied, self._reduce_always = mesh, tied, reduce_always

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
            copy = None if self._tied.last is None else self._tied.last.grad
        divided = self.passes.axes.pipeline > 1
        return total_norm([one for one in gradients if one is not copy], divided=divided)

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


@dataclass(eq=False)
class UnitDivider:
    """Divides modules in place, and keeps their units."""

    config: Fsdp
    model: ModelSource
    precision: Precision
    mesh: DeviceMesh
    of_experts: DeviceMesh | None
    """The mesh of parameters that are divided by experts."""
    units: list[nn.Module] = field(default_factory=list)
    """Units of all modules, inner before outer."""
    reshard_after_forward: set[bool] = field(default_factory=set)
    """Whether units below the roots are resharded between forward and backward."""

    def __call__(self, module: nn.Module) -> None:
        """Divide a model, or a stage of it."""
        config, axes = self.config, DATA_AXES[self.config.sharding]
        blocks = [one for one in self.model.blocks(module) if not isinstance(one, Absent)]
        if config.tensor_parallel is not None and config.tensor_parallel.size > 1:
            compiled = self.model.compiled_modules(module)
            here = [one for one in compiled if not isinstance(one, Absent)]
            divide_layers(config.tensor_parallel, module, blocks, self.mesh["tensor"], here)
        mesh, experts = self.mesh[axes], list[nn.Module]()
        if self.of_experts is not None:
            experts = divide_experts(module, self.of_experts["expert"], self.mesh["tensor"])
            self._shard(experts, self.of_experts[axes])
            shards = self.of_experts["shard"].size()
            for one in experts:
                assert isinstance(one, FSDPModule)
                # Gradients of experts already sum the tokens of all ranks of their group.
                one.set_gradient_divide_factor(float(mesh.size()))
                # Otherwise torch asks for a reduction that gloo does not have; of one shard it
                # would divide twice.
                one.set_force_sum_reduction_for_comms(shards > 1)
        ends, towers = self.model.ends(module), list(self.model.tower_blocks(module))
        repeated = [*towers, *blocks]
        units = [one for one in choose_units(config, module, repeated, ends) if one not in experts]
        late = kept_units(config, units, repeated)
        early = [one for one in units if one not in late]
        self._shard(early, mesh)
        self._shard(late, mesh, reshard=False)
        self._shard([module], mesh)
        if (embedding := ends[0]) in units:
            # Backward does not gather it: the gradient of a table whose rows are looked up needs
            # indices only.
            assert isinstance(embedding, FSDPModule)
            embedding.set_unshard_in_backward(False)
        # Text does not pass through towers, so nothing gathers them ahead.
        self._prefetch([one for one in units if one not in towers], experts)
        self.units += [*experts, *units, module]
        if experts or early:
            self.reshard_after_forward.add(config.gathers_again)
        if late:
            self.reshard_after_forward.add(False)

    def _shard(self, units: Sequence[nn.Module], mesh: DeviceMesh, *, reshard: bool = True) -> None:
        """Make units of modules. Without `reshard` they stay gathered from forward to backward."""
        policy = MixedPrecisionPolicy(
            param_dtype=torch_dtype(self.precision.compute),
            reduce_dtype=torch_dtype(self.precision.reduce),
        )
        offload, config = OffloadPolicy(), self.config
        if config.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=config.pin_memory and mesh.device_type == "cuda")
        # None reshards every unit but the root, which backward needs at once.
        again = None if reshard and config.gathers_again else False
        for unit in units:
            fully_shard(
                unit, mesh=mesh, reshard_after_forward=again, mp_policy=policy,
                offload_policy=offload,
            )  # fmt: skip

    def _prefetch(self, units: Sequence[nn.Module], experts: Sequence[nn.Module]) -> None:
        """Name the units that are gathered ahead of each, where torch's own order is not enough.
        Experts are units inside of their blocks. Where ranks divide them, the host waits in every
        block for numbers of tokens and cannot run ahead, and in backward a block needs its experts
        first; so the next block is gathered with its experts while one computes."""
        forward, backward = self.config.forward_prefetch, self.config.backward_prefetch
        joined: list[list[Any]] = [
            [unit, *(one for one in experts if one in set(unit.modules()))] for unit in units
        ]
        for place, (unit, *_) in enumerate(joined):
            if forward or experts:
                ahead = joined[place + 1 :][: forward or 1]
                unit.set_modules_to_forward_prefetch([*itertools.chain(*ahead)])
            if backward != 1 or experts:
                before = joined[:place][::-1][:backward]
                unit.set_modules_to_backward_prefetch([*itertools.chain(*before)])


def choose_units(
    config: Fsdp, module: nn.Module, blocks: Sequence[nn.Module],
    ends: tuple[nn.Module | None, nn.Module | None],
) -> list[nn.Module]:  # fmt: skip
    """The units in forward order, inner before outer, without the root. With blocks, `ends`
    (embedding and head) are units too, except those that share a weight: it stays in the root,
    whose time covers both uses. Raises StageError if the recipe's choice finds none in this model,
    or separates tied weights."""
    owners: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners[parameter].add(owner)
    if config.units == "block":
        units, what = list(blocks), "transformer blocks; name their classes in `units`"
    else:
        named = set(config.units)
        units = [one for one in _inner_first(module) if type(one).__name__ in named]
        what = f"modules of class {', '.join(sorted(named))}"
    if not units:
        raise StageError(f"{type(module).__name__} has no {what}")
    # torch gathers a weight in one unit, which has to hold all of its owners.
    weights = {one: [*one.parameters()] for one in (*units, *ends) if one is not None}
    held = ((one, {*one.modules()}) for one in weights)
    closed = {one for one, inside in held if all(owners[own] <= inside for own in weights[one])}
    for unit in units:
        if unit not in closed:
            raise StageError(
                f"{type(unit).__name__} shares a weight with a module outside of it",
                hint="choose units that hold all owners of a tied weight, or none",
            )
    if config.units == "block":
        # An end without weights, or with weights of others, is none.
        first, last = (
            [one] if one is not None and one in closed and weights[one] else [] for one in ends
        )
        units = [*first, *units, *last]
    return units


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    """Every module below `module`, children before their parents."""
    for child in module.children():
        yield from _inner_first(child)
        yield child


def kept_units(
    config: Fsdp, units: Sequence[nn.Module], blocks: Sequence[nn.Module]
) -> list[nn.Module]:
    """The units that stay gathered after forward: the last block and the head, since backward
    begins with them; in a pipeline also the embedding, which the next micro-batch needs."""
    if config.units != "block":
        return []
    asked = config.pipeline_parallel
    in_stages = asked is not None and asked.size > 1
    again = blocks[:-1] if in_stages else units[: units.index(blocks[-1])]
    return [unit for unit in units if unit not in again]
