"""An embedding that two stages of a pipeline share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline.utils import local_part


class TiedEmbedding:
    """An embedding that the first stage looks up and the last multiplies with: each has a copy.

    Both start alike. Their gradients are summed before each step, and optimizers are functions of
    gradient and state, so the copies stay the same to the bit. `first` and `last` are the copies on
    this rank, of which a rank has one or none (`build_pipeline` refuses schedules that
    put both on one).
    """

    def __init__(
        self, group: ProcessGroup, first: nn.Parameter | None, last: nn.Parameter | None
    ) -> None:
        self._group = group
        self._first = first
        self.repeated = last
        """The last stage's copy, which the gradient norm leaves out."""

    def sum_gradients(self) -> None:
        """Give both copies the sum of their gradients (collective among their ranks)."""
        first, last = _gradient(self._first), _gradient(self.repeated)
        if first is not None:
            self._add_other(first, self._group.size() - 1)
        elif last is not None:
            self._add_other(last, 0)

    def _add_other(self, own: Tensor, peer: int) -> None:
        """Add the gradient that rank `peer` of the group has. A sum of two is the same in either
        order, so both ranks get equal bits."""
        other = torch.empty_like(own)
        exchange = [
            dist.P2POp(dist.isend, own, group=self._group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self._group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        own.add_(other)


def _gradient(parameter: nn.Parameter | None) -> Tensor | None:
    """This rank's part of the parameter's gradient; None if it has none."""
    grad = None if parameter is None else parameter.grad
    return None if grad is None else local_part(grad)
