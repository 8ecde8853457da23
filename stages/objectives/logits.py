"""Losses and scores of tokens from their logits, also where ranks divide them by the vocabulary.

No rank ever holds a token's divided logits whole: three numbers a token are communicated, the
largest logit, the sum of exponentials and the target's logit, in fp32 (Shoeybi et al. 2019,
Megatron-LM, section 3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from pipeline import NO_TARGET
from pipeline.utils import local_part, own_chunk
from stages.collectives import all_reduce, sum_gradients
from stages.objectives.compat import compiled, rows_vary

LossOfLogits = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""Logits (tokens, vocabulary), which it may overwrite, labels (tokens,) of int64, and whether a
gradient is wanted -> the loss of each token, and the gradient of their sum by the logits, in their
dtype."""


def loss_of_logits(logits: Tensor, labels: Tensor, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """The cross-entropy in nats of each target token, 0 for others, fp32 of shape (tokens,), and
    with `gradient` the gradient of their sum by `logits` (tokens, vocabulary), in their memory and
    dtype.

    All is computed in fp32 and rounded at the end: softmax, less one at the target; zero for tokens
    without target. In addition to `logits`, one fp32 matrix of their shape is in memory."""
    largest = logits.amax(-1, keepdim=True).float()
    places, target_logit = _targets(logits, labels, largest)
    # Kernels of GPUs read and write numbers of several dtypes; those of CPUs copy all to one first.
    mixed = logits.is_cuda
    wide = logits - largest if mixed else logits.float().sub_(largest)
    total = wide.exp_().sum(-1, keepdim=True)
    loss, scale, at_target = _of_tokens(labels, total, target_logit)
    if not gradient:
        return loss, None
    if mixed:
        torch.mul(wide, scale, out=logits)
    else:
        logits.copy_(wide.mul_(scale))
    logits[places] = at_target.to(logits.dtype)
    return loss, logits


@functools.cache
def compiled_loss(backend: str) -> LossOfLogits:
    """`loss_of_logits` compiled by a backend of torch.compile, once for all numbers of tokens; the
    gradient has separate memory."""
    pure = compiled(_pure, backend=backend, fullgraph=True)

    def loss(logits: Tensor, labels: Tensor, gradient: bool) -> tuple[Tensor, Tensor | None]:
        if len(logits) < 2:  # torch takes 1 for a size that does not vary
            return loss_of_logits(logits, labels, gradient)
        rows_vary(logits, labels)
        found: tuple[Tensor, Tensor | None] = pure(logits, labels, gradient)
        return found

    return loss


def _pure(logits: Tensor, labels: Tensor, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """The same without writing to `logits`, as torch's compiler fuses it: a pass that reads, and
    one that reads and writes, without an fp32 matrix. It knows maximum and sum of a softmax by this
    order of operations."""
    wide = logits.float()
    largest = wide.amax(-1, keepdim=True)
    places, target_logit = _targets(logits, labels, largest)
    powers = (wide - largest).exp()
    loss, scale, at_target = _of_tokens(labels, powers.sum(-1, keepdim=True), target_logit)
    if not gradient:
        return loss, None
    found = (powers * scale).to(logits.dtype)
    found[places] = at_target.to(logits.dtype)
    return loss, found


def _targets(
    logits: Tensor, labels: Tensor, largest: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Row and column of each token's target, column 0 without one, and its logit less the `largest`
    (tokens, 1), in fp32."""
    places = torch.arange(len(logits), device=logits.device), labels.clamp(min=0)
    return places, logits[places].float() - largest[:, 0]


def _of_tokens(labels: Tensor, total: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each token, the factor by which its exponentials (sum: `total`) are its gradient
    (tokens, 1), and the gradient at its target (tokens,); `target` is the target's logit."""
    trained = labels != NO_TARGET
    loss = torch.where(trained, total[:, 0].log() - target, 0.0)
    scale = trained[:, None] / total
    return loss, scale, target.exp() * scale[:, 0] - trained.to(target.dtype)


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
        """The largest logit of each token over all ranks (collective); shape (tokens, 1)."""
        most = logits.new_full((len(logits),), -torch.inf)
        if self.size:
            most = logits.amax(-1)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return most[:, None]

    def loss_of_logits(
        self, logits: Tensor, labels: Tensor, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The same as the function `loss_of_logits` (collective)."""
        loss, wide = self.loss_and_gradient(logits.float(), labels, gradient)
        return loss, None if wide is None else logits.copy_(wide)

    def loss_and_gradient(
        self, logits: Tensor, labels: Tensor, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of each token, and with `gradient` the gradient of their sum by this rank's
        `logits` (tokens, own entries of the vocabulary) of fp32, in their memory (collective)."""
        columns, here = self.columns(labels[:, None])
        logits.sub_(self.largest(logits))
        target_logit = logits.new_zeros(len(logits))
        if self.size:  # a product with `here` would be NaN where the first column is -inf
            target_logit = torch.where(here, logits.gather(-1, columns), 0.0)[:, 0]
        sums = torch.stack([logits.exp_().sum(-1), target_logit])
        dist.all_reduce(sums, group=self.group)
        total, target_logit = sums
        trained = labels != NO_TARGET
        loss = torch.where(trained, total.log() - target_logit, 0.0)
        if not gradient:
            return loss, None
        wide = logits.div_(total[:, None])
        if self.size:
            wide.scatter_add_(-1, columns, -here.to(wide.dtype))
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


class ScoreColumns(NamedTuple):
    """Which scores of each token are asked for; computes them as columns of one tensor."""

    tokens: bool
    entropy: bool
    candidates: int
    """Number of ids whose log-probabilities are asked for."""

    def __bool__(self) -> bool:
        return self.tokens or self.entropy or self.candidates > 0

    def named(self, columns: Tensor) -> dict[str, Tensor]:
        """Columns, shape (..., columns), by the names that `Scores` has for them."""
        found, rest = dict[str, Tensor](), columns
        if self.tokens:
            found["tokens"], rest = rest[..., 0], rest[..., 1:]
        if self.entropy:
            found["entropy"], rest = rest[..., 0], rest[..., 1:]
        if self.candidates:
            found["candidates"] = rest
        return found

    def __call__(
        self, logits: Tensor, labels: Tensor, candidates: Tensor | None,
        shard: VocabularyShard | None,
    ) -> Tensor:  # fmt: skip
        """The scores of tokens, fp32, shape (tokens, columns); 0 for tokens without target.

        `logits` (tokens, vocabulary), whole or this rank's `shard`; `labels` (tokens,) and
        `candidates` (tokens, k) of int64. Collective with a shard, and the same on its ranks."""
        wide, trained = logits.float(), labels != NO_TARGET
        normaliser = _normaliser(wide, shard)
        columns = []
        if self.tokens:
            columns.append(_at(wide, labels.clamp(min=0)[:, None], shard) - normaliser)
        if self.entropy:
            # An id whose logit is -inf adds 0, not 0 times -inf.
            least = torch.finfo(torch.float32).min
            # Each rank uses it for its own part of the vocabulary.
            shared = normaliser if shard is None else sum_gradients(normaliser, shard.group)
            log_shares = (wide - shared).clamp(min=least)
            negative = (log_shares.exp() * log_shares).sum(-1, keepdim=True)
            columns.append(-(negative if shard is None else all_reduce(negative, shard.group)))
        if candidates is not None:
            # Not 1 less the candidates' mass, which cancels where they have nearly all of it.
            asked = torch.zeros_like(wide, dtype=torch.bool)
            if shard is None:
                asked.scatter_(-1, candidates, True)
            elif shard.size:
                asked.scatter_reduce_(-1, *shard.columns(candidates), "amax")
            others = _normaliser(wide.masked_fill(asked, -torch.inf), shard)
            columns += [_at(wide, candidates, shard) - normaliser, others - normaliser]
        return torch.where(trained[:, None], torch.cat(columns, dim=-1), 0.0)


OF_LABELS = ScoreColumns(tokens=True, entropy=False, candidates=0)


def _normaliser(logits: Tensor, shard: VocabularyShard | None) -> Tensor:
    """log sum exp of each token's logits over the whole vocabulary; shape (tokens, 1)."""
    if shard is None:
        return logits.logsumexp(-1, keepdim=True)
    with torch.no_grad():
        largest = shard.largest(logits)
    part = (logits - largest).exp().sum(-1, keepdim=True)
    return largest + all_reduce(part, shard.group).log()


def _at(logits: Tensor, ids: Tensor, shard: VocabularyShard | None) -> Tensor:
    """The logits of `ids`, shape (tokens, k)."""
    if shard is None:
        return logits.gather(-1, ids)
    columns, here = shard.columns(ids)
    part = torch.zeros_like(ids, dtype=logits.dtype)
    if shard.size:
        part = torch.where(here, logits.gather(-1, columns), 0.0)
    # An id that no rank has is an error of an index elsewhere.
    known = (ids >= 0) & (ids < shard.whole)
    return all_reduce(part, shard.group).masked_fill(~known, torch.nan)


def whole_vocabulary(logits: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Logits (..., vocabulary) of fp32 from a shard's (collective)."""
    if shard is None:
        return logits.float()
    ends = shard.first, shard.whole - shard.first - shard.size
    return all_reduce(F.pad(logits.float(), ends), shard.group)
