"""A few steps on fixed tokens, with an engine and in a plain torch loop, on any device."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

from pipeline.contracts.data import NO_TARGET, MicroBatch
from pipeline.contracts.engine import WEIGHT, Engine
from pipeline.contracts.model import ModelSource
from pipeline.contracts.objective import Objective
from pipeline.contracts.optimizer import torch_dtype
from pipeline.contracts.stage import Context
from pipeline.distributed.process_group import DistContext, environment_dist
from stages.adapter.lora import Lora
from stages.model.hf import HfModel
from stages.objectives.cross_entropy import CrossEntropy
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from tests.support.batches import accumulated, micro_batch
from tests.support.runs import context
from tests.support.strategies import Strategy

STEPS, MICRO, ROWS, LENGTH, VOCABULARY = 5, 2, 4, 32, 128
LR, DECAY, CLIP, EPS = 5e-3, 0.5, 0.5, 1e-6
"""With this decay, and this small a limit of the norm, a loop without either is far away; with this
`eps` a gradient that is nothing but rounding moves no weight."""

LLAMA: Mapping[str, Any] = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 112,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
"""Sizes that products in 8 bits (multiples of 16) and flex attention (heads of 16) take."""

Weights = dict[str, Tensor]
Steps = Sequence[Sequence[MicroBatch]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model under a strategy, as plain data that travels to ranks."""

    wrap: str = "wrap.ddp"
    fields: Mapping[str, Any] = field(default_factory=dict)
    compute: str = "fp32"
    model: Mapping[str, Any] = field(default_factory=lambda: LLAMA)
    hf: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of model.hf."""
    lora: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Numbers of a training: mean losses and gradient norms of its steps."""

    losses: list[float]
    norms: list[float]


def group_of_one(folder: Path, device: str) -> DistContext:
    """Start the process group of one rank that meets itself in `folder`."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    store = torch.distributed.FileStore(str(folder / "store"), 1)  # type: ignore[attr-defined]
    return environment_dist(store, device=device)


def source(ctx: Context, case: Case) -> ModelSource:
    """Return the case's model with random weights."""
    model = HfModel(config=dict(case.model), init="random", **case.hf).run(ctx)
    return model if case.lora is None else Lora(**case.lora).run(ctx, model)


def engine_of(ctx: Context, case: Case, model: ModelSource | None = None) -> Engine:
    """Return the case's engine."""
    precision = PrecisionPolicy(compute=case.compute).run(ctx)  # type: ignore[arg-type]
    plan = AdamW(lr=LR, weight_decay=DECAY, max_grad_norm=CLIP, eps=EPS).run(ctx)
    wrap = Strategy(use=case.wrap, fields=case.fields).stage()
    engine: Engine = wrap.run(ctx, model or source(ctx, case), precision, plan)
    return engine


def made_steps(device: torch.device, *, steps: int = STEPS, rows: int = ROWS) -> Steps:
    """Return `MICRO` micro-batches of each step, of `rows` samples with uneven numbers of targets,
    the same in every second step: a model learns them."""
    return [
        [_batch(step % 2 * MICRO + at, rows, device) for at in range(MICRO)]
        for step in range(steps)
    ]


def _batch(number: int, rows: int, device: torch.device) -> MicroBatch:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = NO_TARGET
    return micro_batch(tokens[:, :-1].to(device), labels.to(device))


def targets_of(batches: Sequence[MicroBatch]) -> int:
    """Return the number of target tokens of micro-batches."""
    return sum(int((batch.labels != NO_TARGET).sum()) for batch in batches)


def lr_scale(step: int) -> float:
    """Return the factor on the learning rate of a step, from 0."""
    return 1 - 0.1 * step


def train(
    engine: Engine, steps: Steps, *, objective: Objective | None = None, first: int = 0
) -> Trained:
    """Train on this rank's micro-batches, which all ranks share evenly."""
    objective = objective or CrossEntropy()
    losses, norms, axis = [], [], engine.data_axis
    for step, batches in enumerate(steps, first):
        targets, own = targets_of(batches), [_share(batch, axis) for batch in batches]
        part = accumulated(engine, own, targets, objective)
        report = engine.step(lr_scales=[lr_scale(step)])
        losses.append(float(engine.total(part)) / targets)
        norms.append(report.grad_norm)
    return Trained(losses=losses, norms=[float(norm) for norm in norms])


def _share(batch: MicroBatch, axis: Any) -> MicroBatch:
    rows = slice(axis.index, None, axis.count)
    return MicroBatch(tokens={name: one[rows] for name, one in batch.tokens.items()})


def plain(
    model: ModelSource, steps: Steps, compute: str, device: torch.device
) -> tuple[Trained, Weights, Weights]:
    """Train without any engine; return the numbers, the weights before and the weights after.

    Forward and backward use the weights cast to `compute`, the optimizer is torch's AdamW over
    fp32, one tensor after another. Documents of packed samples are computed one by one.
    """
    module, reader, dtype = model.build(), model.weights(), torch_dtype(compute)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(reader.read(name))
    module.to(device)
    parameters = dict(module.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = _adamw(parameters)
    losses, norms = [], []
    for step, batches in enumerate(steps):
        targets, total = targets_of(batches), 0.0
        for batch in batches:
            cast = {name: parameter.to(dtype) for name, parameter in parameters.items()}
            loss = sum(_loss(module, cast, *part) for part in _documents(batch)) / targets
            loss.backward()
            total += float(loss)
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)))
        for group in optimizer.param_groups:
            group["lr"] = LR * lr_scale(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    after = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    return Trained(losses=losses, norms=[float(norm) for norm in norms]), before, after


def _adamw(parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.ndim >= 2], "weight_decay": DECAY},
        {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=LR, eps=EPS, foreach=False)


def _loss(module: Any, cast: Weights, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = torch.func.functional_call(module, cast, kwargs={"input_ids": tokens}).logits
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, labels.flatten(), ignore_index=NO_TARGET, reduction="sum")


def _documents(batch: MicroBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batch, or each document of its packed samples."""
    if batch.positions is None:
        yield batch.input_ids, batch.labels
        return
    for tokens, labels, positions in zip(
        batch.input_ids, batch.labels, batch.positions, strict=True
    ):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
        for start, stop in itertools.pairwise(starts):
            yield tokens[None, start:stop], labels[None, start:stop]


def apart(engine: Engine, before: Weights, after: Weights) -> dict[str, float]:
    """Return how far this rank's part of each trained weight is from `after`, in units of how far
    that is from `before`."""
    found = {}
    for fragment in engine.fragments():
        if len(fragment.state) == 1:  # a frozen weight has no moments
            continue
        assert not fragment.stride
        whole, part = after[fragment.name], fragment.state[WEIGHT]
        own = part.to(whole.device)  # an offloaded one is in host memory
        start, stop = fragment.start, fragment.start + own.numel()
        wanted = whole.flatten()[start:stop]
        origin = before[fragment.name].flatten()[start:stop]
        found[fragment.name] = float((own - wanted).norm() / (wanted - origin).norm())
    return found


def started(dist: DistContext, folder: Path | str) -> Context:
    """Return the context of a run; its random streams begin anew."""
    torch.manual_seed(7)
    return context(dist, folder)
