"""This process's part of a distributed tensor."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor, differentiable; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_chunk(total: int, mesh: DeviceMesh) -> range:
    """Rows of `total` that this process has on a mesh of one axis, by the rule of torch.chunk,
    which DTensor follows."""
    size = -(-total // mesh.size())
    first = min(size * mesh.get_local_rank(), total)
    return range(first, min(first + size, total))
