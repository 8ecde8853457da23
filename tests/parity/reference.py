"""The reference for all numbers: a plain single-process torch loop, one sample at a time."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

from pipeline.contracts.optimizer import torch_dtype
from pipeline.contracts.sample_order import SampleOrder
from pipeline.distributed.process_group import DistContext
from stages.model import source as model_source
from stages.wrap.build import named_parameters
from tests.parity.body import (
    ADAMW,
    BATCH,
    CLIP,
    DECAY,
    LR,
    SEED,
    STEPS,
    WARMUP,
    Case,
    source_of,
)
from tests.support.optimizers import made_of
from tests.support.runs import context

Numbers = tuple[list[float], list[float], dict[str, torch.Tensor], float]
"""Per-step losses and gradient norms, final trained weights, held-out loss."""
CHANGES_NOTHING = ("activation_checkpointing", "compile")
"""Fields of model.hf without effect on numbers."""
_known: dict[str, Numbers] = {}


def plain_loop(case: Case, together: Sequence[int] | None = None) -> Numbers:
    """Return the reference of a case; cases share it if they differ only in what must not change
    the numbers.

    A module of dynamic NTK that transformers has computed with remembers the longest text, so of
    rotary angles that depend on the length only LongRoPE is transformers' own here.
    """
    dropped = {*CHANGES_NOTHING, *(["frozen"] if case.towers else [])}
    hf = {name: value for name, value in case.hf.items() if name not in dropped}
    case = replace(case, ranks=1, wrap="", fields={}, loop={}, master="", hf=hf, towers=False)
    same = repr((case, together))
    if same not in _known:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            if "longrope" in same:
                patch.setattr(model_source, "choose_by_document", lambda model: None)
            ctx = context(DistContext(device=torch.device("cpu")), folder, SEED)
            source = source_of(ctx, case)
            source = source if case.lora is None else source.inference_view
            plan = None if case.optimizer == ADAMW else case.optimizer.run(ctx)
            _known[same] = _train(source, case, plan, together)
    return _known[same]


def steps_of(result: Any, key: str) -> list[float]:
    """Return a number of each step's record."""
    return [record[key] for record in result["records"] if "loss" in record]


def assert_same_numbers(result: Any, expected: Numbers, heldout: float = 1e-5) -> None:
    """Compare all that `train_case` returned and wrote with the reference; `heldout` is the
    relative tolerance of the held-out loss."""
    losses, norms, weights, mean = expected
    assert steps_of(result, "step") == list(range(1, len(losses) + 1))
    assert steps_of(result, "loss") == pytest.approx(losses, rel=1e-5)
    assert steps_of(result, "grad_norm") == pytest.approx(norms, rel=1e-4)
    assert result["eval_loss"] == pytest.approx(mean, rel=heldout)
    assert_same_weights(Path(result["folder"]), weights)


def assert_same_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Compare the trained weights with those in `folder`/final.safetensors."""
    final = load_file(folder / "final.safetensors")
    assert weights
    assert weights.keys() <= final.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(final[name], weight, rtol=0, atol=1e-4, msg=name)


def _train(source: Any, case: Case, plan: Any, together: Sequence[int] | None) -> Numbers:
    """Train in a plain loop.

    The optimizer is torch's AdamW, or the plan's, over whole parameters. The forward pass runs on
    parameters cast to the case's dtype; everything else is fp32. `together` is the number of
    samples, padded, that pass through the model at a time instead of one: for models that look at a
    whole batch.
    """
    torch.manual_seed(0)
    model, reader = source.build(), source.weights()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(reader.read(name))
    optimizer = _adamw(parameters) if plan is None else made_of(plan, named_parameters(model))
    base = [group["lr"] for group in optimizer.param_groups]
    data, compute = case.data, torch_dtype(case.compute)
    order = SampleOrder(SEED, len(data.train))
    losses, norms = [], []
    for step in range(STEPS):
        samples = [data.train[index] for index in order.indices(step * BATCH, BATCH).tolist()]
        if together is None:
            total = sum(_loss(model, sample, compute) for sample in samples)
        else:
            rest = iter(samples)
            cut = [list(itertools.islice(rest, size)) for size in together]
            total = sum(_padded_loss(model, some) for some in cut)
        loss = total / _targets(samples)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * _cosine(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    heldout = [data.heldout[index] for index in range(len(data.heldout))]
    with torch.no_grad():
        mean = float(sum(_loss(model, one, compute) for one in heldout)) / _targets(heldout)
    weights = {name: one.detach().clone() for name, one in parameters.items() if one.requires_grad}
    return losses, norms, weights, mean


def _targets(samples: Sequence[Any]) -> int:
    return sum(int((sample.labels != -100).sum()) for sample in samples)


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


def _cosine(step: int) -> float:
    if step < WARMUP:
        return step / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))
