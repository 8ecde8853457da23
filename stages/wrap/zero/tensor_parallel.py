"""Tensor parallelism under ZeRO: each rank's part of the layers is a model of its own to DeepSpeed,
which shards it among the ranks that have the same part.

The layers are divided as under wrap.fsdp (`stages/wrap/tensor/`), and not by DeepSpeed's AutoTP,
which builds the whole model on every rank, replaces modules, and sends pickles.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from pipeline import Context, ModelSource, StageError
from pipeline.utils import with_values
from stages.wrap.mesh import parameter_mesh, warn_of_slow_groups
from stages.wrap.tensor.divide import divide_layers
from stages.wrap.tensor.placements import Wholes, is_divided, mark, take_parts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from stages.wrap.axes import Axes
    from stages.wrap.zero.stage import Zero


def megatron_groups(data: ProcessGroup, tensor: ProcessGroup) -> SimpleNamespace:
    """The groups of a rank, as DeepSpeed asks for them of Megatron's `mpu`: `data` are the ranks
    that have the same part of the model, `tensor` those that together have the model."""
    return SimpleNamespace(
        get_data_parallel_group=lambda: data,
        get_data_parallel_group_ranks=lambda: dist.get_process_group_ranks(data),
        get_data_parallel_world_size=lambda: dist.get_world_size(data),
        get_data_parallel_rank=lambda: dist.get_rank(data),
        get_model_parallel_group=lambda: tensor,
        get_model_parallel_world_size=lambda: dist.get_world_size(tensor),
        get_model_parallel_rank=lambda: dist.get_rank(tensor),
    )


class ZeroDivider:
    """Divides one model in place, and keeps the groups that follow from it."""

    def __init__(self, stage: Zero, ctx: Context, axes: Axes) -> None:
        """Make the groups (collective)."""
        self._stage = stage
        self._axes = axes
        self._device = ctx.dist.device
        warn_of_slow_groups(ctx, axes)
        with with_values():
            mesh = parameter_mesh(axes, ctx.dist.device.type, axes.data * axes.context)
        self._mesh = mesh["tensor"]
        self._wholes: Wholes = {}
        self.groups = megatron_groups(mesh["shard"].get_group(), self._mesh.get_group())

    def divide(self, model: ModelSource, module: nn.Module) -> None:
        """Divide a module on the meta device in place; its parameters become this rank's parts.
        Raises StageError for a model that does not divide so."""
        assert self._stage.tensor_parallel is not None
        blocks, late = model.blocks(module), self._stage.stage == 3
        divide_layers(self._stage.tensor_parallel, module, blocks, self._mesh, late=late)
        self._wholes = take_parts(module)
        if self._stage.stage < 3:
            self._require_equal_parts(module)

    def _require_equal_parts(self, module: nn.Module) -> None:
        """Raise StageError if ranks have flat tensors of different lengths: then sums over more
        than two ranks are made in different orders, and what all hold alike would drift apart."""
        own = torch.tensor([one.numel() for one in module.parameters()], device=self._device)
        first = own.clone()
        source = dist.get_global_rank(self._mesh.get_group(), 0)
        dist.broadcast(first, source, self._mesh.get_group())
        differ = (own != first).any().to(torch.int32)
        dist.all_reduce(differ, dist.ReduceOp.MAX)
        if differ and self.groups.get_data_parallel_world_size() > 2:
            message = "tensor_parallel: the vocabulary, or a layer, divides into unequal parts"
            hint = "set stage: 3, or a size that divides it"
            raise StageError(message, hint=hint)

    def mark(self, module: nn.Module) -> None:
        """Let the parameters of a divided module, which are others by now, say what they are parts
        of, and which of them the norm counts once."""
        mark(module, self._wholes)
        for name, parameter in module.named_parameters():
            # The rest is counted once in the norm of gradients.
            parameter.tensor_model_parallel = is_divided(self._wholes[name])  # type: ignore[attr-defined]
