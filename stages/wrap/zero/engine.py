"""The live side of wrap.zero."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.contracts.engine import DataAxis, Engine, EngineState, Fragment, StepGuard, StepReport
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.precision import Precision
from pipeline.distributed.process_group import DistContext
from stages.wrap.load_weights import Part
from stages.wrap.materialize import dtype_names, parameter_count, trained
from stages.wrap.zero import compat
from stages.wrap.zero.state import ZeroState


class ZeroEngine(Engine):
    """DeepSpeed's engine behind the common port. Accumulation is unmanaged: gradients are summed
    over micro-batches and applied by one `step`."""

    def __init__(
        self, live: Any, dist: DistContext, precision: Precision, plan: OptimizerPlan
    ) -> None:
        self.deepspeed = live
        self.model = live
        self.device = dist.device
        self.shard = DataAxis(index=dist.rank, count=dist.world_size)
        self._scaling = precision.loss_scaling
        self._max_grad_norm = plan.max_grad_norm
        # Groups are renewed when a checkpoint is loaded, base rates are not.
        self._base_rates = [group["lr"] for group in compat.update_groups(live)]
        interval = self._scaling.growth_interval if self._scaling else 1
        self._admission = Admission(compat.inner_optimizers(live))
        self._state = ZeroState(live, plan, self._base_rates, interval)

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.deepspeed.backward(loss, scale_wrt_gas=False)

    def step(self, *, lr_scale: float, should_step: StepGuard | None = None) -> StepReport:
        live = self.deepspeed
        for group, base in zip(compat.update_groups(live), self._base_rates, strict=True):
            group["lr"] = base * lr_scale
        scaler = compat.loss_scaler(live)
        scale = 1.0 if scaler is None else float(scaler.cur_scale)
        with self._admission.asking(should_step, lambda: compat.global_grad_norm(live)) as answer:
            live.step()
        finite = bool(live.was_step_applied())
        if finite:
            self._grow_scale(scaler)
        applied = finite and not answer.refused
        self._state.applied += applied
        norm = live.get_global_grad_norm()
        return StepReport(grad_norm=float(norm), applied=applied, loss_scale=scale)

    def _grow_scale(self, scaler: Any | None) -> None:
        # DeepSpeed grows the scale before it unscales the gradients of the same step, which
        # halves them; so its window never ends and the growth is done here, between steps.
        if scaler is None or self._scaling is None:
            return
        if compat.steps_since_overflow(scaler) % self._scaling.growth_interval == 0:
            scaler.cur_scale *= scaler.scale_factor

    def state(self) -> EngineState:
        return self._state.tell()

    def fragments(self) -> Iterator[Fragment]:
        return self._state.fragments()

    def restore(self, state: EngineState) -> Iterator[Fragment]:
        return self._state.restore(state)

    def sync_compute_weights(self) -> None:
        self._state.sync_compute_weights()

    def weights(self) -> Iterator[Part]:
        """See ZeroState."""
        return self._state.weights()

    def describe(self) -> Mapping[str, Any]:
        return facts(self.deepspeed)

    def close(self) -> None:
        if self.deepspeed is not None:
            live, self.deepspeed = self.deepspeed, None
            del self.model, self._state
            live.destroy()


@dataclass
class Answer:
    """What came of asking in one step."""

    refused: bool = False


@dataclass
class _Question:
    """To be asked once in a step, however many optimizers and groups take part in it."""

    should_step: StepGuard
    norm: Callable[[], float]
    answer: Answer
    asked: bool = False
    hidden: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)

    def refused(self) -> bool:
        if not self.asked:
            self.asked, self.answer.refused = True, not self.should_step(self.norm())
        return self.answer.refused


class Admission:
    """Stands before the steps of these optimizers."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._question: _Question | None = None
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    @contextlib.contextmanager
    def asking(self, should_step: StepGuard | None, norm: Callable[[], float]) -> Iterator[Answer]:
        """Let steps in the body depend on what `should_step` says to `norm()`, which is called when
        an optimizer is about to step; without `should_step`, on nothing."""
        answer = Answer()
        self._question = None if should_step is None else _Question(should_step, norm, answer)
        try:
            yield answer
        finally:
            self._question = None

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        question = self._question
        if question is None or not question.refused():
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    question.hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._question is not None:
            for parameter, gradient in self._question.hidden:
                parameter.grad = gradient
            self._question.hidden.clear()


PADDING = 64
"""Elements that a parameter or group may be padded by, more than any alignment in use."""


def facts(live: Any) -> dict[str, Any]:
    """Read off the engine, its optimizers and its tensors; nothing is taken from a configuration
    when an object can tell."""
    optimizer = live.optimizer
    kept = compat.kept_elements(live.module)
    masters = compat.master_elements(optimizer)
    offload_optimizer, offload_param = compat.offload_devices(optimizer)
    return {
        "engine": type(live).__name__,
        "model": type(live.module).__name__,
        "zero_optimizer": type(optimizer).__name__,
        "optimizer": type(optimizer.optimizer).__name__,
        "zero_stage": compat.zero_stage(optimizer),
        "world_size": torch.distributed.get_world_size(optimizer.dp_process_group),
        "device": str(live.device).partition(":")[0],
        "master": dtype_names(compat.master_partitions(optimizer)),
        "compute": dtype_names(live.module.parameters()),
        "reduce": _name(compat.reduce_dtype(live)),
        "gradient_accumulation": _name(compat.accumulation_dtype(optimizer)),
        "buffers": dtype_names(live.module.buffers()),
        "offload_optimizer": offload_optimizer,
        "offload_param": offload_param,
        "max_grad_norm": optimizer.clip_grad or None,
        "accumulation": "managed" if live.managed_gradient_accumulation() else "unmanaged",
        "loss_scaling": compat.loss_scaler(live) is not None,
        "parameters": parameter_count(live.module, _elements),
        "trained_parameters": sum(_elements(p) for p in trained(live.module)),
        "kept_parameters": kept,
        "kept_masters": masters,
        "partitioned": _is_partitioned(live, masters),
    }


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else dtype_names([torch.empty(0, dtype=dtype)])[0]


def _elements(parameter: Any) -> int:
    """Of the whole parameter, also where it is partitioned."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _is_partitioned(live: Any, masters: int) -> bool:
    """Whether this rank's masters are its share of the trainable elements (plus padding)."""
    world = torch.distributed.get_world_size(live.optimizer.dp_process_group)
    trainable = list(trained(live.module))
    elements = sum(_elements(p) for p in trainable)
    return (
        masters * world >= elements
        and (masters - PADDING * (len(trainable) + 1)) * world <= elements
    )
