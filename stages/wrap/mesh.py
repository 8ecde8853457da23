"""The layout of ranks on the axes of parallelism, outermost first: pipeline, data, context, tensor.

Ranks of a tensor-parallel group are neighbours, since they exchange activations in every layer; then
those of a context-parallel group, which exchange them in every attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline import DataAxis

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Number of ranks on each axis; they multiply to all ranks."""

    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, ranks: int, *, pipeline: int = 1, context: int = 1, tensor: int = 1) -> Axes:
        """The axes of `ranks` ranks, all that is left being data-parallel. Raises ValueError, in
        words, if the ranks do not divide."""
        model = pipeline * context * tensor
        if ranks % model:
            raise ValueError(f"{ranks} processes do not divide into groups of {model}")
        return cls(pipeline=pipeline, data=ranks // model, context=context, tensor=tensor)

    def place(self, rank: int) -> Place:
        """Coordinates of a rank."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return Place(
            pipeline=pipeline,
            context=context,
            tensor=tensor,
            data=DataAxis(index=data, count=self.data),
        )

    def mesh(self, device: str, shards: int) -> DeviceMesh:
        """The mesh of parameters (collective): `pipeline`, `replicate`, `shard` and `tensor`.

        Each part of a parameter is cut again into `shards`, over the data and context axes together.
        """
        from torch.distributed.device_mesh import init_device_mesh

        both = self.data * self.context
        shape = (self.pipeline, both // shards, shards, self.tensor)
        names = ("pipeline", "replicate", "shard", "tensor")
        return init_device_mesh(device, shape, mesh_dim_names=names)

    def sequence_mesh(self, device: str) -> DeviceMesh:
        """The mesh whose axis `context` has the ranks that share a sequence (collective)."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = (self.pipeline * self.data, self.context, self.tensor)
        return init_device_mesh(device, shape, mesh_dim_names=("data", "context", "tensor"))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Coordinates of a rank on the axes."""

    pipeline: int
    data: DataAxis
    context: int
    tensor: int
