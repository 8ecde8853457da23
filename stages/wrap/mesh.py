"""Device meshes and process groups of the axes of parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.device_mesh import init_device_mesh

from pipeline.utils import with_values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from pipeline import Context
    from stages.wrap.axes import Axes


def parameter_mesh(axes: Axes, device: str, shards: int) -> DeviceMesh:
    """The mesh over which parameters are cut: `pipeline`, `replicate`, `shard`, `tensor`
    (collective). Each tensor-parallel part is cut again into `shards`, over the data and context
    axes together."""
    both = axes.data * axes.context
    shape = (axes.pipeline, both // shards, shards, axes.tensor)
    names = ("pipeline", "replicate", "shard", "tensor")
    return init_device_mesh(device, shape, mesh_dim_names=names)


def expert_mesh(axes: Axes, device: str, shards: int, experts: int) -> DeviceMesh:
    """The mesh over which experts are cut (collective): as `parameter_mesh`, but for an axis
    `expert` of `experts` ranks, which are neighbours among the `shards`."""
    both = axes.data * axes.context
    shape = (axes.pipeline, both // shards, shards // experts, experts, axes.tensor)
    names = ("pipeline", "replicate", "shard", "expert", "tensor")
    return init_device_mesh(device, shape, mesh_dim_names=names)


def context_group(axes: Axes, device: str) -> ProcessGroup:
    """The ranks that share this rank's samples (collective)."""
    shape = (axes.pipeline * axes.data, axes.context, axes.tensor)
    names = ("outer", "context", "tensor")
    with with_values():
        return init_device_mesh(device, shape, mesh_dim_names=names)["context"].get_group()


def warn_of_slow_groups(ctx: Context, axes: Axes) -> None:
    """Log a warning if tensor-parallel groups reach over nodes."""
    here = ctx.dist.local_world_size
    if axes.tensor > 1 and here % axes.tensor and ctx.dist.world_size > here:
        ctx.log.warning(
            "tensor_parallel: groups of %d ranks reach over nodes of %d, and exchange activations "
            "in every layer",
            axes.tensor, here,
        )  # fmt: skip
