"""Cross-entropy of logits and its gradient, in few passes over them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from pipeline import NO_TARGET
from stages.objectives.compile_compat import compiled, rows_vary

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
    columns, target_logit = _targets(logits, labels, largest)
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
    logits[_token_indices(logits), columns] = at_target.to(logits.dtype)
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
    columns, target_logit = _targets(logits, labels, largest)
    powers = (wide - largest).exp()
    loss, scale, at_target = _of_tokens(labels, powers.sum(-1, keepdim=True), target_logit)
    if not gradient:
        return loss, None
    found = (powers * scale).to(logits.dtype)
    found[_token_indices(logits), columns] = at_target.to(logits.dtype)
    return loss, found


def _targets(logits: Tensor, labels: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """The column of each token's target, or 0 without one, and its logit less the `largest`
    (tokens, 1), in fp32."""
    columns = labels.clamp(min=0)
    return columns, logits[_token_indices(logits), columns].float() - largest[:, 0]


def _of_tokens(labels: Tensor, total: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each token, the factor by which its exponentials (sum: `total`) are its gradient
    (tokens, 1), and the gradient at its target (tokens,); `target` is the target's logit."""
    trained = labels != NO_TARGET
    loss = torch.where(trained, total[:, 0].log() - target, 0.0)
    scale = trained[:, None] / total
    return loss, scale, target.exp() * scale[:, 0] - trained.to(target.dtype)


def _token_indices(logits: Tensor) -> Tensor:
    return torch.arange(len(logits), device=logits.device)
