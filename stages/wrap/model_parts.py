"""The part of a model that one rank computes with, for planning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.planning import Division, Topology
from stages.wrap.axes import context_group, parameter_mesh, required

if TYPE_CHECKING:
    from pipeline import MicroBatch


def model_parts(stage: Any, topology: Topology, shards: int = 1) -> Division | None:
    """The division that a wrap stage asks for, of whose ranks `shards` share the parameters; None
    if every rank computes all of the model."""
    parts = ModelParts(stage, topology, shards)
    return parts if parts.axes.data < parts.axes.ranks or parts.experts > 1 else None


class ModelParts(Division):
    """Divides layers, sequences and experts as a wrap stage asks for it and the engines do it."""

    def __init__(self, stage: Any, topology: Topology, shards: int) -> None:
        self.axes, self.shards = required(stage, topology.ranks), shards
        self.tensor = getattr(stage, "tensor_parallel", None) if self.axes.tensor > 1 else None
        block = getattr(stage, "expert_parallel", None)
        self.experts, self.stages = 1 if block is None else int(block.size), self.axes.pipeline

    @property
    def key(self) -> Mapping[str, Any]:
        tensor = self.tensor and dataclasses.asdict(self.tensor)
        return {"tensor": tensor, "context": self.axes.context, "experts": self.experts}

    def divide(
        self, model: Any, blocks: Sequence[Any]
    ) -> tuple[Mapping[str, str], Mapping[str, int]]:
        from stages.wrap.context_compat import ContextParallel
        from stages.wrap.experts_compat import divide_experts
        from stages.wrap.tensor_divide import divide_layers

        axes, groups, experts = self.axes, dict[str, str](), dict[str, int]()
        if self.tensor is not None:
            mesh = parameter_mesh(axes, "cpu", self.shards)["tensor"]
            divide_layers(self.tensor, model, blocks, mesh)
            groups[mesh.get_group().group_name] = "activations of divided layers"
        if self.experts > 1:
            meshes = parameter_mesh(axes, "cpu", self.shards, self.experts)
            dispatched = divide_experts(model, meshes["expert"], meshes["tensor"])
            own = {parameter for module in dispatched for parameter in module.parameters()}
            experts = {name: self.experts for name, one in model.named_parameters() if one in own}
            groups[meshes["expert"].get_group().group_name] = "tokens of experts"
        if axes.context > 1:
            group = context_group(axes, "cpu")
            ContextParallel(model, group, axes.tensor)
            groups[group.group_name] = "states of attention"
        return groups, experts

    def own(self, batch: MicroBatch) -> MicroBatch:
        from stages.batches.layout import padded, sequence_slice

        whole = padded(batch, self.axes.context * self.axes.tensor)
        return whole if self.axes.context == 1 else sequence_slice(whole, 0, self.axes.context)
