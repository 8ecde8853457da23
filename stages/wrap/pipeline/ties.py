"""An embedding that two stages of a pipeline share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from pipeline.utils import local_part


class TiedEmbedding:
    """An embedding that the first stage looks up and the last multiplies with: each has a copy.

    Both start alike. Their gradients are summed before each step, and optimizers are functions of
    gradient and state, so the copies stay the same to the bit. `first` and `last` are the copies on
    this rank, which has one or none: schedules that put both on one are refused.
    """

    def __init__(
        self, group: ProcessGroup, first: nn.Parameter | None, last: nn.Parameter | None
    ) -> None:
        self._group, self._first = group, first
        self.repeated = last
        """The last stage's copy, which the gradient norm leaves out."""

    def sum_gradients(self) -> None:
        """Give both copies the sum of their gradients (collective among their ranks). A sum of two
        is the same in either order, so both ranks get equal bits."""
        for copy, peer in ((self._first, self._group.size() - 1), (self.repeated, 0)):
            if copy is None or copy.grad is None:
                continue
            own = local_part(copy.grad)
            other = torch.empty_like(own)
            exchange = [
                dist.P2POp(dist.isend, own, group=self._group, group_peer=peer),
                dist.P2POp(dist.irecv, other, group=self._group, group_peer=peer),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            own.add_(other)
