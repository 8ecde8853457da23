"""The division of a model by wrap.fsdp, on the meta device: its layers, then its units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from pipeline import ModelSource, Precision, StageError, torch_dtype
from stages.wrap.experts import divide_experts
from stages.wrap.pipeline.split import kept
from stages.wrap.tensor.divide import divide_layers

if TYPE_CHECKING:
    from stages.wrap.fsdp import Fsdp

DATA_AXES = {
    "full_shard": ("shard",),
    "shard_grad_op": ("shard",),
    "hybrid_shard": ("replicate", "shard"),
    "no_shard": ("replicate", "shard"),
}
"""Axes of the mesh over which each kind of sharding works."""


class UnitDivider:
    """Divides modules in place, and keeps their units."""

    def __init__(
        self,
        config: Fsdp,
        model: ModelSource,
        precision: Precision,
        mesh: DeviceMesh,
        experts: DeviceMesh | None,
    ) -> None:
        """`experts` is the mesh of parameters that are divided by experts."""
        self._experts = experts
        self.data_mesh = mesh[DATA_AXES[config.sharding]]
        self.units: list[nn.Module] = []
        """Units of all modules, inner before outer."""
        self.reshard_after_forward: set[bool] = set()
        """Whether units below the roots are given up between forward and backward."""
        self._config = config
        self._model = model
        self._precision = precision
        self._mesh = mesh

    def __call__(self, module: nn.Module) -> None:
        """Divide a model, or a stage of it."""
        config, blocks = self._config, kept(self._model.blocks(module))
        if config.tensor_parallel is not None and config.tensor_parallel.size > 1:
            compiled = kept(self._model.compiled_modules(module))
            divide_layers(config.tensor_parallel, module, blocks, self._mesh["tensor"], compiled)
        experts: list[nn.Module] = []
        if self._experts is not None:
            experts = divide_experts(module, self._experts["expert"], self._mesh["tensor"])
            _shard(config, experts, self._experts[DATA_AXES[config.sharding]], self._precision)
            for one in experts:
                _average_over(one, self.data_mesh.size(), self._experts["shard"].size())
        ends = self._model.ends(module)
        towers = list(self._model.tower_blocks(module))
        repeated = [*towers, *blocks]
        units = [one for one in choose_units(config, module, repeated, ends) if one not in experts]
        late = kept_units(config, units, repeated)
        early = [one for one in units if one not in late]
        _shard(config, early, self.data_mesh, self._precision)
        _shard(config, late, self.data_mesh, self._precision, reshard=False)
        _shard(config, [module], self.data_mesh, self._precision)
        if (embedding := ends[0]) in units:
            # Backward does not gather it: the gradient of a table whose rows are looked up needs
            # indices alone.
            assert isinstance(embedding, FSDPModule)
            embedding.set_unshard_in_backward(False)
        # Text does not pass through towers, so nothing gathers them ahead.
        _prefetch(config, [one for one in units if one not in towers], experts)
        self.units += [*experts, *units, module]
        self.reshard_after_forward |= {reshards(config) for _ in [*experts, *early]}
        self.reshard_after_forward |= {False for _ in late}


def _shard(
    config: Fsdp,
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    precision: Precision,
    *,
    reshard: bool = True,
) -> None:
    """Make units of modules. Without `reshard` they stay gathered from forward to backward."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch_dtype(precision.compute), reduce_dtype=torch_dtype(precision.reduce)
    )
    offload = OffloadPolicy()
    if config.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=config.pin_memory and mesh.device_type == "cuda")
    # None reshards every unit but the root, which backward needs at once.
    again = None if reshard and reshards(config) else False
    for unit in units:
        fully_shard(
            unit, mesh=mesh, reshard_after_forward=again, mp_policy=policy, offload_policy=offload
        )


def _average_over(unit: nn.Module, ranks: int, shards: int) -> None:
    """Divide the gradients of a unit by another number than that of the ranks that reduce them:
    those of an expert are sums over more ranks' tokens already."""
    assert isinstance(unit, FSDPModule)
    unit.set_gradient_divide_factor(float(ranks))
    # Otherwise torch asks for a reduction that gloo does not have; of one shard it would divide
    # twice.
    unit.set_force_sum_reduction_for_comms(shards > 1)


def _prefetch(config: Fsdp, units: Sequence[nn.Module], experts: Sequence[nn.Module]) -> None:
    """Name the units that are gathered ahead of each, where torch's own order is not enough.

    Experts are units inside of their blocks. Where ranks divide them, the host waits in every
    block for numbers of tokens and cannot run ahead, and in backward a block needs its experts
    first; so the next block is gathered with its experts while one computes.
    """
    forward, backward = config.forward_prefetch, config.backward_prefetch
    inside = {unit: [one for one in experts if one in set(unit.modules())] for unit in units}
    for place, unit in enumerate(units):
        assert isinstance(unit, FSDPModule)
        if forward or experts:
            ahead = units[place + 1 :][: forward or 1]
            unit.set_modules_to_forward_prefetch(_with(inside, ahead))
        if backward != 1 or experts:
            before = units[:place][::-1][:backward]
            unit.set_modules_to_backward_prefetch(_with(inside, before))


def _with(inside: dict[nn.Module, list[nn.Module]], units: Sequence[nn.Module]) -> list[FSDPModule]:
    """Units, and behind each the units inside of it."""
    both = [one for unit in units for one in (unit, *inside[unit])]
    return [one for one in both if isinstance(one, FSDPModule)]


def reshards(config: Fsdp) -> bool:
    """Whether units are gathered for forward, and again for backward."""
    return config.sharding in ("full_shard", "hybrid_shard")


def choose_units(
    config: Fsdp,
    module: nn.Module,
    blocks: Sequence[nn.Module],
    ends: tuple[nn.Module | None, nn.Module | None],
) -> list[nn.Module]:
    """The units in forward order, inner before outer, without the root.

    With blocks, `ends` (embedding and head) are units too, except those that share a weight: it
    stays in the root, whose time covers both uses. Raises StageError if the recipe's choice finds
    none in this model, or separates tied weights.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners[parameter].add(owner)
    if config.units == "block":
        units, what = list(blocks), "transformer blocks; name their classes in `units`"
    else:
        named = set(config.units)
        units = [m for m in _inner_first(module) if type(m).__name__ in named]
        what = f"modules of class {', '.join(sorted(named))}"
    if not units:
        raise StageError(f"{type(module).__name__} has no {what}")
    for unit in units:
        if not _closed(unit, owners):
            raise StageError(
                f"{type(unit).__name__} shares a weight with a module outside of it",
                hint="choose units that hold all owners of a tied weight, or none",
            )
    if config.units == "block":
        # An end without weights, or with weights of others, is none.
        first, last = (
            [one] if one is not None and [*one.parameters()] and _closed(one, owners) else []
            for one in ends
        )
        units = [*first, *units, *last]
    return units


def kept_units(
    config: Fsdp, units: Sequence[nn.Module], blocks: Sequence[nn.Module]
) -> list[nn.Module]:
    """The units that are not given up after forward: the last block and the head, since backward
    begins with them; in a pipeline also the embedding, which the next micro-batch needs."""
    if config.units != "block":
        return []
    asked = config.pipeline_parallel
    again = (
        blocks[:-1] if asked is not None and asked.size > 1 else units[: units.index(blocks[-1])]
    )
    return [unit for unit in units if unit not in again]


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    """Every module below `module`, children before their parents."""
    for child in module.children():
        yield from _inner_first(child)
        yield child


def _closed(unit: nn.Module, owners: dict[nn.Parameter, set[nn.Module]]) -> bool:
    """Whether `unit` holds all owners of its weights; torch gathers a weight in one unit."""
    inside = set(unit.modules())
    return all(owners[parameter] <= inside for parameter in unit.parameters())
