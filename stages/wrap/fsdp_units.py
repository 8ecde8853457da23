"""The division of a model by wrap.fsdp, on the meta device: its layers, then its units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

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

from pipeline import ModelSource, Precision, StageError, torch_dtype
from stages.wrap.experts_compat import divide_experts
from stages.wrap.fsdp_fields import FsdpFields
from stages.wrap.pipeline.split import kept
from stages.wrap.tensor.divide import divide_layers

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
        self, config: FsdpFields, model: ModelSource, precision: Precision, mesh: DeviceMesh,
        experts: DeviceMesh | None,
    ) -> None:  # fmt: skip
        """`experts` is the mesh of parameters that are divided by experts."""
        self.config, self._model, self._precision = config, model, precision
        self._mesh, self._experts = mesh, experts
        self.data_mesh = mesh[DATA_AXES[config.sharding]]
        self.units: list[nn.Module] = []
        """Units of all modules, inner before outer."""
        self.reshard_after_forward: set[bool] = set()
        """Whether units below the roots are resharded between forward and backward."""

    @property
    def places(self) -> dict[str, Any]:
        """Keyword arguments of `build_module`: the ranks that share the reading of weights, and the
        device of parameters."""
        hybrid = self.data_mesh.ndim == 2
        return {
            "replicas": self.data_mesh["replicate"].get_group() if hybrid else None,
            "home": torch.device("cpu") if self.config.cpu_offload else None,
        }

    def __call__(self, module: nn.Module) -> None:
        """Divide a model, or a stage of it."""
        config, blocks = self.config, kept(self._model.blocks(module))
        if config.tensor_parallel is not None and config.tensor_parallel.size > 1:
            compiled = kept(self._model.compiled_modules(module))
            divide_layers(config.tensor_parallel, module, blocks, self._mesh["tensor"], compiled)
        experts: list[nn.Module] = []
        if self._experts is not None:
            experts = divide_experts(module, self._experts["expert"], self._mesh["tensor"])
            self._shard(experts, self._experts[DATA_AXES[config.sharding]])
            shards = self._experts["shard"].size()
            for one in experts:
                assert isinstance(one, FSDPModule)
                # Gradients of experts already sum the tokens of all ranks of their group.
                one.set_gradient_divide_factor(float(self.data_mesh.size()))
                # Otherwise torch asks for a reduction that gloo does not have; of one shard it
                # would divide twice.
                one.set_force_sum_reduction_for_comms(shards > 1)
        ends = self._model.ends(module)
        towers = list(self._model.tower_blocks(module))
        repeated = [*towers, *blocks]
        units = [one for one in choose_units(config, module, repeated, ends) if one not in experts]
        late = kept_units(config, units, repeated)
        early = [one for one in units if one not in late]
        self._shard(early, self.data_mesh)
        self._shard(late, self.data_mesh, reshard=False)
        self._shard([module], self.data_mesh)
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
        compute, reduce = self._precision.compute, self._precision.reduce
        policy = MixedPrecisionPolicy(
            param_dtype=torch_dtype(compute), reduce_dtype=torch_dtype(reduce)
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
        first; so the next block is gathered with its experts while one computes.
        """
        forward, backward = self.config.forward_prefetch, self.config.backward_prefetch
        inside = {unit: [one for one in experts if one in set(unit.modules())] for unit in units}

        def with_experts(some: Sequence[nn.Module]) -> list[FSDPModule]:
            both = [one for unit in some for one in (unit, *inside[unit])]
            return [one for one in both if isinstance(one, FSDPModule)]

        for place, unit in enumerate(units):
            assert isinstance(unit, FSDPModule)
            if forward or experts:
                ahead = units[place + 1 :][: forward or 1]
                unit.set_modules_to_forward_prefetch(with_experts(ahead))
            if backward != 1 or experts:
                before = units[:place][::-1][:backward]
                unit.set_modules_to_backward_prefetch(with_experts(before))


def choose_units(
    config: FsdpFields, module: nn.Module, blocks: Sequence[nn.Module],
    ends: tuple[nn.Module | None, nn.Module | None],
) -> list[nn.Module]:  # fmt: skip
    """The units in forward order, inner before outer, without the root.

    With blocks, `ends` (embedding and head) are units too, except those that share a weight: it
    stays in the root, whose time covers both uses. Raises StageError if the recipe's choice finds
    none in this model, or separates tied weights.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners[parameter].add(owner)

    def closed(unit: nn.Module) -> bool:
        """Whether `unit` holds all owners of its weights; torch gathers a weight in one unit."""
        inside = set(unit.modules())
        return all(owners[parameter] <= inside for parameter in unit.parameters())

    if config.units == "block":
        units, what = list(blocks), "transformer blocks; name their classes in `units`"
    else:
        named = set(config.units)
        units = [one for one in _inner_first(module) if type(one).__name__ in named]
        what = f"modules of class {', '.join(sorted(named))}"
    if not units:
        raise StageError(f"{type(module).__name__} has no {what}")
    for unit in units:
        if not closed(unit):
            raise StageError(
                f"{type(unit).__name__} shares a weight with a module outside of it",
                hint="choose units that hold all owners of a tied weight, or none",
            )
    if config.units == "block":
        # An end without weights, or with weights of others, is none.
        first, last = (
            [one] if one is not None and [*one.parameters()] and closed(one) else [] for one in ends
        )
        units = [*first, *units, *last]
    return units


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    """Every module below `module`, children before their parents."""
    for child in module.children():
        yield from _inner_first(child)
        yield child


def kept_units(
    config: FsdpFields, units: Sequence[nn.Module], blocks: Sequence[nn.Module]
) -> list[nn.Module]:
    """The units that stay gathered after forward: the last block and the head, since backward
    begins with them; in a pipeline also the embedding, which the next micro-batch needs."""
    if config.units != "block":
        return []
    asked = config.pipeline_parallel
    in_stages = asked is not None and asked.size > 1
    again = blocks[:-1] if in_stages else units[: units.index(blocks[-1])]
    return [unit for unit in units if unit not in again]
