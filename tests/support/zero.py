"""Programs of each rank in the ZeRO tests: a few steps on fixed tokens, with ZeRO and in a plain
loop."""

from __future__ import annotations

import ctypes.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors.torch import save_file
from torch import Tensor

from pipeline.contracts.data import MicroBatch
from pipeline.contracts.engine import Engine
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import LossScaling, Precision
from pipeline.distributed.process_group import DistContext
from stages.optimizer.adamw import AdamW
from stages.wrap.build import named_parameters
from stages.wrap.zero import Zero
from tests.support.batches import accumulated, micro_batch, summed_loss
from tests.support.optimizers import made_of
from tests.support.runs import TINY, context, tiny_model

LR, DECAY, CLIP, LENGTH = 1e-3, 0.1, 0.5, 13


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run, as plain data that travels to the ranks."""

    zero: dict[str, Any]
    compute: str = "fp32"
    master: str = "fp32"
    loss_scaling: LossScaling | None = None
    clip: float | None = CLIP
    samples: int = 4
    """Samples of each step, over all ranks."""
    last: int = 4
    save: bool = False
    """Whether DeepSpeed's own `save_checkpoint` writes `folder`/saved at the end."""
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Further fields of optimizer.adamw."""
    frozen: str = ""
    """Part of the names of parameters that are not trained."""
    explode_at: int = -1
    """Step whose loss overflows fp16."""
    vetoed: int = -1
    """Step that the guard refuses."""


def source(ctx: Any, case: Case) -> ModelSource:
    return tiny_model(ctx, case.model, case.frozen)


def batch(step: int, samples: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels with uneven numbers of targets; a pure function of the step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, TINY["vocab_size"], (samples, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row, length in enumerate(torch.randint(2, LENGTH, (samples,), generator=generator)):
        labels[row, length:] = -100
    return tokens[:, :-1], labels


def share(engine: Engine, step: int, samples: int) -> tuple[list[MicroBatch], int]:
    """Return this rank's micro-batches of one sample each, and the targets of all ranks."""
    tokens, labels = batch(step, samples)
    axis = engine.data_axis
    rows = [slice(row, row + 1) for row in range(axis.index, samples, axis.count)]
    batches = [micro_batch(tokens[row], labels[row]) for row in rows]
    return batches, int((labels != -100).sum())


def precision(case: Case) -> Precision:
    return Precision(
        master=case.master, compute=case.compute, reduce="fp32", buffer=None,
        loss_scaling=case.loss_scaling,
    )  # fmt: skip


def plan(ctx: Any, case: Case) -> Any:
    stage = AdamW(lr=LR, weight_decay=DECAY, max_grad_norm=case.clip, **case.optimizer)
    return stage.run(ctx)


def run_case(dist: DistContext, folder: str, case: Case) -> dict[str, Any]:
    """Train; return every step's reports and the engine's facts. Full fp32 masters go to
    `folder`/masters.safetensors."""
    ctx = context(dist, folder)
    finals: list[Callable[[], object]] = []
    ctx.on_exit = finals.append
    engine: Any = Zero(**case.zero).run(ctx, source(ctx, case), precision(case), plan(ctx, case))
    steps = [one_step(engine, step, case) for step in range(case.last)]
    if case.save:
        engine.deepspeed.save_checkpoint(f"{folder}/saved")
    facts = dict(engine.describe())
    save_masters(engine, Path(folder) / "masters.safetensors", write=dist.is_main)
    for call in reversed(finals):
        call()
    return {"steps": steps, "facts": facts}


def one_step(engine: Engine, step: int, case: Case) -> dict[str, Any]:
    """Run one optimizer step, with one sample in each rank's micro-batch."""
    batches, targets = share(engine, step, case.samples)
    factor = 1e6 if step == case.explode_at else 1.0
    total = engine.total(accumulated(engine, batches, targets / factor))
    guard = (lambda norm: False) if step == case.vetoed else None
    report = engine.step(lr_scales=[1 - 0.1 * step], should_step=guard)
    return {"loss": float(total) / targets, **vars(report)}


def has_libaio() -> bool:
    """Return whether NVMe offload can run here."""
    return ctypes.util.find_library("aio") is not None


def save_masters(engine: Any, file: Path, *, write: bool) -> None:
    from deepspeed.utils import safe_get_full_fp32_param

    named = engine.deepspeed.module.named_parameters()
    masters = {n: safe_get_full_fp32_param(p) for n, p in named if p.requires_grad}
    if write:
        save_file(masters, file)


def plain(folder: str | Path, case: Case) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train without any engine; return losses, gradient norms, final weights."""
    ctx = context(DistContext(device=torch.device("cpu")), folder)
    made = source(ctx, case)
    model = made.build()
    reader = made.weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(reader.read(name))
    the_plan = plan(ctx, case)
    optimizer = made_of(the_plan, named_parameters(model))
    losses, norms = [], []
    for step in range(case.last):
        tokens, labels = batch(step, case.samples)
        whole = micro_batch(tokens, labels)
        loss = summed_loss(model, whole) / int((labels != -100).sum())
        loss.backward()
        limit = float("inf") if case.clip is None else case.clip
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - 0.1 * step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}
