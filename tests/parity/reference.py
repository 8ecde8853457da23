"""The reference for all numbers: a plain single-process torch loop, one sample at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from pipeline.contracts.data import Data
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.sample_order import SampleOrder
from stages.wrap.build import named_parameters
from tests.support.optimizers import made_of

LR, WARMUP, DECAY, CLIP = 1e-3, 2, 0.1, 0.5


def reference(
    source: ModelSource,
    data: Data,
    *,
    seed: int,
    steps: int,
    batch: int,
    compute: torch.dtype = torch.float32,
    plan: OptimizerPlan | None = None,
    together: Sequence[int] | None = None,
) -> tuple[list[float], list[float], dict[str, torch.Tensor], float]:
    """Return per-step losses and gradient norms, final weights, held-out loss.

    The optimizer is torch's AdamW, or the plan's, over whole parameters. The forward pass runs on
    parameters cast to `compute`; everything else is fp32. `together` is the number of samples,
    padded, that pass through the model at a time instead of one: for models that look at a whole
    batch.
    """
    torch.manual_seed(0)
    model = source.build()
    reader = source.weights()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(reader.read(name))
    optimizer = _adamw(parameters) if plan is None else made_of(plan, named_parameters(model))
    base = [group["lr"] for group in optimizer.param_groups]
    order = SampleOrder(seed, len(data.train))
    losses, norms = [], []
    for step in range(steps):
        samples = [data.train[index] for index in order.indices(step * batch, batch).tolist()]
        targets = sum(int((sample.labels != -100).sum()) for sample in samples)
        if together is None:
            loss = sum(_loss(model, sample, compute) for sample in samples) / targets
        else:
            loss = sum(_padded_loss(model, some) for some in _cut(samples, together)) / targets
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * _cosine(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    heldout = [data.heldout[index] for index in range(len(data.heldout))]
    with torch.no_grad():
        total = float(sum(_loss(model, sample, compute) for sample in heldout))
    mean = total / sum(int((sample.labels != -100).sum()) for sample in heldout)
    return losses, norms, {n: p.detach().clone() for n, p in parameters.items()}, mean


def _adamw(parameters: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    trained = [p for p in parameters.values() if p.requires_grad]
    groups = (
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    )
    return torch.optim.AdamW([one for one in groups if one["params"]], lr=LR, foreach=False)


def _loss(model: Any, sample: Any, compute: torch.dtype) -> torch.Tensor:
    """Return the loss with each document computed by itself."""
    cast = {name: parameter.to(compute) for name, parameter in model.named_parameters()}
    total = torch.zeros(())
    for tokens, labels in _documents(sample):
        logits = torch.func.functional_call(model, cast, kwargs={"input_ids": tokens[None]}).logits
        total = total + F.cross_entropy(
            logits[0].float(), labels, ignore_index=-100, reduction="sum"
        )
    return total


def _cut(samples: list[Any], sizes: Sequence[int]) -> Iterator[list[Any]]:
    rest = iter(samples)
    return (list(itertools.islice(rest, size)) for size in sizes)


def _padded_loss(model: Any, samples: list[Any]) -> torch.Tensor:
    rows = [torch.from_numpy(sample.input_ids) for sample in samples]
    labels = [torch.from_numpy(sample.labels) for sample in samples]
    logits = model(input_ids=pad_sequence(rows, batch_first=True)).logits
    targets = pad_sequence(labels, batch_first=True, padding_value=-100)
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum"
    )


def _documents(sample: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    tokens, labels = torch.from_numpy(sample.input_ids), torch.from_numpy(sample.labels)
    starts = [0] if sample.positions is None else np.flatnonzero(sample.positions == 0).tolist()
    for start, stop in itertools.pairwise([*starts, len(tokens)]):
        yield tokens[start:stop], labels[start:stop]


def _cosine(step: int, total: int) -> float:
    if step < WARMUP:
        return step / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (total - WARMUP)))
