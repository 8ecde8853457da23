"""The norm of the whole model's gradient, and its scaling, wherever its parts are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.utils import local_part
from stages.wrap.torch_compat import multiply_all, norms_of


def total_norm(gradients: Sequence[Tensor], *, divided: bool = False) -> Tensor:
    """L2 norm over the gradients of all ranks, accumulated in fp32; a scalar (collective, if they
    are DTensors, or `divided`: ranks have different ones, and one may have none).

    Parts may lie on any meshes: each is counted by the one of its holders that is first on the
    axes that replicate it. Plain tensors are the same on every rank.
    """
    own = [local_part(gradient) for gradient in gradients if _is_first_holder(gradient)]
    device = local_part(gradients[0]).device if gradients else torch.device("cpu")
    norms = [norm.float() for norm in _norms([part for part in own if part.numel()])]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)
    if divided or any(isinstance(gradient, DTensor) for gradient in gradients):
        total = norm.square()
        torch.distributed.all_reduce(total)
        return total.sqrt()
    return norm


def multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply the gradients, in place, by a scalar that is the same on every rank."""
    locals_ = sorted(map(local_part, gradients), key=_kind)
    for _, same in itertools.groupby(locals_, key=_kind):
        parts = list(same)
        multiply_all(parts, factor.to(parts[0].device))


def _norms(parts: list[Tensor]) -> Sequence[Tensor]:
    if parts and all(part.dtype == torch.float32 for part in parts):
        return norms_of(parts)
    # torch's foreach norms accumulate in the gradients' own dtype.
    return [torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]


def _is_first_holder(gradient: Tensor) -> bool:
    if not isinstance(gradient, DTensor):
        return True
    axes = enumerate(gradient.placements)
    mesh = gradient.device_mesh
    return all(mesh.get_local_rank(axis) == 0 for axis, one in axes if one.is_replicate())


def _kind(part: Tensor) -> tuple[str, str]:
    return str(part.device), str(part.dtype)
