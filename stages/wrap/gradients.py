"""The norm of the whole model's gradient, its scaling, and the scaling of losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

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

    Works across meshes: each shard is counted once, by the first rank on the axes that replicate
    it. Plain tensors are the same on every rank.
    """
    sharded = [one for one in gradients if isinstance(one, DTensor)]
    repeated = {
        id(one)
        for one in sharded
        for axis, placement in enumerate(one.placements)
        if placement.is_replicate() and one.device_mesh.get_local_rank(axis)
    }
    own = [local_part(one) for one in gradients if id(one) not in repeated]
    own = [one for one in own if one.numel()]
    if not own:
        norm = torch.zeros((), device=local_part(gradients[0]).device if gradients else "cpu")
    elif all(one.dtype == torch.float32 for one in own):
        norm = torch.linalg.vector_norm(torch.stack([*norms_of(own)]))
    else:  # torch's foreach norms accumulate in the gradients' own dtype
        norms = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in own]
        norm = torch.linalg.vector_norm(torch.stack(norms))
    if divided or sharded:
        total = norm.square()
        torch.distributed.all_reduce(total)
        return total.sqrt()
    return norm


def multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply the gradients, in place, by a scalar that is the same on every rank."""
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for part in map(local_part, gradients):
        kinds[part.device, part.dtype].append(part)
    for (device, _), same in kinds.items():
        multiply_all(same, factor.to(device))


GROWTH, BACKOFF = 2.0, 0.5


class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018, Mixed Precision Training, section 3.2): the
    factor by which losses are multiplied, so that gradients stay in the range of fp16. It is halved
    when a gradient overflows, and doubled after `growth_interval` steps without."""

    def __init__(self, scaling: LossScaling) -> None:
        self.scale, self._good_steps = scaling.initial_scale, 0
        self._interval = scaling.growth_interval

    def update(self, *, overflowed: bool) -> None:
        """Adjust the scale after a step."""
        self._good_steps = 0 if overflowed else self._good_steps + 1
        if overflowed:
            self.scale *= BACKOFF
        elif self._good_steps == self._interval:
            self.scale *= GROWTH
            self._good_steps = 0

    @property
    def state(self) -> LossScale:
        """State for a checkpoint."""
        return LossScale(scale=self.scale, good_steps=self._good_steps)

    def restore(self, saved: LossScale) -> None:
        """Go on from a checkpoint. The interval stays the recipe's."""
        self.scale, self._good_steps = saved.scale, saved.good_steps % self._interval
