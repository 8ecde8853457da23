"""Cross-entropy of logits that ranks divide by the vocabulary.

No rank ever holds a token's logits whole: three numbers a token are communicated, the largest
logit, the sum of exponentials and the target's logit, in fp32 (Shoeybi et al. 2019, Megatron-LM,
section 3).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from pipeline import NO_TARGET
from pipeline.utils import local_part, own_chunk


class VocabularyShard(NamedTuple):
    """The entries of the vocabulary that this rank has."""

    first: int
    size: int
    whole: int
    """Entries of all ranks."""
    group: ProcessGroup

    @classmethod
    def find(cls, tensor: Tensor) -> VocabularyShard | None:
        """The shard of a tensor of logits or of a head's weight, a DTensor on a mesh of one axis or
        a plain tensor that says what it is a part of; None for a whole one."""
        whole = tensor if isinstance(tensor, DTensor) else getattr(tensor, "part_of", None)
        if whole is None or all(placement.is_replicate() for placement in whole.placements):
            return None
        mesh, (placement,) = whole.device_mesh, whole.placements
        assert placement.is_shard(), f"the vocabulary is not sharded: {placement}"
        entries = whole.shape[placement.dim]  # type: ignore[union-attr]
        here = own_chunk(entries, mesh)
        return cls(here.start, len(here), entries, mesh.get_group())

    def columns(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of `ids` in this rank's logits, 0 for others', and whether they are here."""
        columns = ids - self.first
        here = (columns >= 0) & (columns < self.size)
        return torch.where(here, columns, 0), here

    def largest(self, logits: Tensor) -> Tensor:
        """The largest logit of each token over all ranks (collective); shape (tokens,)."""
        most = logits.new_full((len(logits),), -torch.inf)
        if self.size:
            most = logits.amax(-1)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return most

    def loss_of_logits(
        self, logits: Tensor, labels: Tensor, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The same as `logits_loss.loss_of_logits` (collective)."""
        loss, wide = self.loss_and_gradient(logits.float(), labels, gradient)
        return loss, None if wide is None else logits.copy_(wide)

    def loss_and_gradient(
        self, logits: Tensor, labels: Tensor, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of each token, and with `gradient` the gradient of their sum by this rank's
        `logits` (tokens, own entries of the vocabulary) of fp32, in their memory (collective)."""
        columns, here = self.columns(labels)
        columns = columns[:, None]
        largest = self.largest(logits)
        logits.sub_(largest[:, None])
        target_logit = torch.zeros_like(largest)
        if self.size:  # a product with `here` would be NaN where the first column is -inf
            target_logit = torch.where(here, logits.gather(-1, columns)[:, 0], 0.0)
        sums = torch.stack([logits.exp_().sum(-1), target_logit])
        dist.all_reduce(sums, group=self.group)
        total, target_logit = sums
        trained = labels != NO_TARGET
        loss = torch.where(trained, total.log() - target_logit, 0.0)
        if not gradient:
            return loss, None
        wide = logits.div_(total[:, None])
        if self.size:
            wide.scatter_add_(-1, columns, -here[:, None].to(wide.dtype))
        return loss, wide.mul_(trained[:, None])


def sharded_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in nats of `logits` (tokens, vocabulary), a DTensor divided by the vocabulary
    on a mesh of one axis, summed over the target tokens; an fp32 scalar, equal on all its ranks. So
    are `labels` (tokens,) of int64."""
    shard = VocabularyShard.find(logits)
    summed: Tensor = _ShardedCrossEntropy.apply(local_part(logits), labels, shard)  # type: ignore[no-untyped-call]
    return summed


class _ShardedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, shard: VocabularyShard) -> Tensor:
        # A copy, even of fp32 logits, as it is overwritten.
        wide = logits.to(torch.float32, copy=True)
        loss, gradient = shard.loss_and_gradient(wide, labels, ctx.needs_input_grad[0])
        ctx.dtype = logits.dtype
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream).to(ctx.dtype), None, None
