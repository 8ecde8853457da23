"""Forward and backward of a head, on the same random inputs for every implementation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from apart.child import Check, Job, Place, Work
from torch import Tensor

from stages.objectives.chunked import chunked_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden states (tokens, width), weight (vocabulary, width), labels (tokens,) -> summed loss."""
SHOWN = 1000
"""Elements of each gradient that are compared."""


def full(job: Job, place: Place) -> Work:
    """Compute all logits at once."""
    return _work(job, lambda h, w, y: F.cross_entropy(F.linear(h, w).float(), y, reduction="sum"))


def ours(job: Job, place: Place) -> Work:
    """Compute the loss as `loss_chunk_size` does."""
    return _work(job, lambda h, w, y: chunked_cross_entropy(h, w, None, y, job["chunk"]))


def torch_own(job: Job, place: Place) -> Work:
    """Compute torch's linear_cross_entropy, in chunks of its choice."""
    options = torch.nn.LinearCrossEntropyOptions()
    return _work(
        job, lambda h, w, y: F.linear_cross_entropy(h, w, y, reduction="sum", options=options)
    )


def _work(job: Job, loss: Loss) -> Work:
    torch.set_num_threads(job["threads"])
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, job["dtype"])
    hidden = torch.randn(job["tokens"], job["width"], generator=generator).to(dtype)
    weight = torch.randn(job["vocabulary"], job["width"], generator=generator).to(dtype)
    weight *= job["width"] ** -0.5
    labels = torch.randint(0, job["vocabulary"], (job["tokens"],), generator=generator)
    hidden.requires_grad_()
    weight.requires_grad_()

    def work() -> Check:
        summed = loss(hidden, weight, labels)
        (summed / job["tokens"]).backward()
        return lambda: _found(summed, hidden.grad, weight.grad)

    return work


def _found(summed: Tensor, *gradients: Tensor | None) -> dict[str, Any]:
    told: dict[str, Any] = {"loss": float(summed.detach()), "gradients": []}
    for gradient in gradients:
        assert gradient is not None
        flat = gradient.float().flatten()
        some = flat[:: max(flat.numel() // SHOWN, 1)][:SHOWN]
        told["gradients"].append({"norm": float(flat.norm()), "some": some.tolist()})
    told["digest"] = hashlib.sha256(str(told).encode()).hexdigest()
    return told
