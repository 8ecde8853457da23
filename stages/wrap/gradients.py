"""The norm of the whole model's gradient, wherever its parts are, its scaling, and loss scaling."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline import LossScale, LossScaling
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


GROWTH, BACKOFF = 2.0, 0.5


class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018, Mixed Precision Training, section 3.2): the
    factor by which losses are multiplied, so that gradients stay in the range of fp16.

    It is halved when a gradient overflows, and doubled after `growth_interval` steps without.
    """

    def __init__(self, scaling: LossScaling) -> None:
        self.scale = scaling.initial_scale
        self._interval = scaling.growth_interval
        self._good_steps = 0

    def update(self, *, overflowed: bool) -> None:
        """Adjust the scale after a step."""
        if overflowed:
            self.scale *= BACKOFF
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._interval:
            self.scale *= GROWTH
            self._good_steps = 0

    @property
    def state(self) -> LossScale:
        """State for a checkpoint."""
        return LossScale(scale=self.scale, good_steps=self._good_steps)

    def restore(self, saved: LossScale) -> None:
        """Go on from a checkpoint. The interval stays the recipe's."""
        self.scale = saved.scale
        self._good_steps = saved.good_steps % self._interval
