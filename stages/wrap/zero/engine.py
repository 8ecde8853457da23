"""The live half of wrap.zero."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline import (
    Engine,
    EngineState,
    Fragment,
    LossParts,
    Measure,
    MicroBatch,
    Objective,
    OptimizerPlan,
    Precision,
    StepGuard,
    StepReport,
    Unit,
    dtype_name,
)
from stages.objectives.judge import StepSums
from stages.wrap.build import dtype_names, parameter_count, trained
from stages.wrap.load_weights import LocalShard
from stages.wrap.optimizer_state import declared_state
from stages.wrap.passes import Passes
from stages.wrap.zero import compat
from stages.wrap.zero.state import ZeroState


class ZeroEngine(Engine):
    """DeepSpeed's engine behind the common port. Accumulation is unmanaged: gradients are summed
    over micro-batches and applied by one `step`."""

    def __init__(
        self, live: Any, passes: Passes, precision: Precision, plan: OptimizerPlan
    ) -> None:
        self.passes = passes
        self.parts, self.device = passes.parts, passes.device
        self.data_axis = passes.here.data
        self.random_stream, self.random_streams = passes.here.stream, passes.axes.streams
        self.deepspeed = live
        (self._rule,) = plan.parts
        self._scaling = precision.loss_scaling
        # Groups are renewed when a checkpoint is loaded, base rates are not.
        self._base_rates = [group["lr"] for group in live.optimizer.optimizer.param_groups]
        interval = self._scaling.growth_interval if self._scaling else 1
        self._veto = StepVeto(live.optimizer.optimizer)
        self._state = ZeroState(live, self._rule, self._base_rates, interval)

    def accumulate(
        self, batches: Iterable[MicroBatch], objective: Objective, *, counts: Mapping[Unit, float]
    ) -> LossParts:
        # DeepSpeed averages gradients over these ranks.
        factor = self.passes.axes.data * self.passes.axes.context
        backward = functools.partial(self.deepspeed.backward, scale_wrt_gas=False)
        sums = StepSums(objective, self.device, counts, factor=factor)
        # Nothing surrounds a micro-batch: DeepSpeed reduces gradients as they come.
        return self.passes.train(batches, sums, lambda last: nullcontext(), backward)

    def evaluate(self, batches: Iterable[MicroBatch], measure: Measure) -> Generator[Tensor | None]:
        return self.passes.evaluate(batches, measure)

    def step(
        self, *, lr_scales: Sequence[float], should_step: StepGuard | None = None
    ) -> StepReport:
        self.announce_change()
        live = self.deepspeed
        groups = live.optimizer.optimizer.param_groups
        for group, base in zip(groups, self._base_rates, strict=True):
            group["lr"] = base * lr_scales[0]
        scaler = compat.loss_scaler(live)
        scale = 1.0 if scaler is None else float(scaler.cur_scale)
        self._veto.arm(should_step, lambda: compat.global_grad_norm(live))
        if self._state.applied:
            live.step()
        else:  # the first update here shows what the rule keeps
            with declared_state(live.optimizer.optimizer, self._rule):
                live.step()
        finite = bool(live.was_step_applied())
        if finite:
            self._grow_scale(scaler)
        applied = finite and not self._veto.refused
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
        return self._state.read()

    def fragments(self) -> Iterator[Fragment]:
        return self._state.fragments()

    @property
    def lasting_fragments(self) -> bool:
        return "nvme" not in compat.offload_devices(self.deepspeed.optimizer)

    def restore(self, state: EngineState) -> Iterator[Fragment]:
        self.announce_change()
        return self._state.restore(state)

    def sync_compute_weights(self) -> None:
        self._state.sync_compute_weights()

    def master_shards(self) -> Iterator[LocalShard]:
        """See ZeroState."""
        return self._state.master_shards()

    def describe(self) -> Mapping[str, Any]:
        """Read off the engine, its optimizers and its tensors, not off a configuration."""
        live, optimizer = self.deepspeed, self.deepspeed.optimizer
        offload_optimizer, offload_param = compat.offload_devices(optimizer)
        return {
            "engine": type(live).__name__,
            "model": type(live.module).__name__,
            "zero_optimizer": type(optimizer).__name__,
            "optimizer": type(optimizer.optimizer).__name__,
            "zero_stage": compat.zero_stage(optimizer),
            "world_size": torch.distributed.get_world_size(optimizer.dp_process_group)
            * compat.model_parallel_ranks(live),
            "axes": self.passes.axes.sizes,
            "tensor_parallel": compat.model_parallel_ranks(live),
            "device": str(live.device).partition(":")[0],
            "master": dtype_names(compat.master_partitions(optimizer)),
            "compute": dtype_names(live.module.parameters()),
            "reduce": dtype_name(compat.reduce_dtype(live)),
            "buffers": dtype_names(live.module.buffers()),
            "offload_optimizer": offload_optimizer,
            "offload_param": offload_param,
            "max_grad_norm": optimizer.clip_grad or None,
            "accumulation": "managed" if live.managed_gradient_accumulation() else "unmanaged",
            "loss_scaling": compat.loss_scaler(live) is not None,
            "parameters": parameter_count(live.module, compat.full_numel),
            "trained_parameters": sum(map(compat.full_numel, trained(live.module))),
        }

    def close(self) -> None:
        if self.deepspeed is not None:
            live, self.deepspeed = self.deepspeed, None
            del self.passes, self.parts, self._state
            live.destroy()
            compat.forget_groups()


class StepVeto:
    """Lets a guard veto a step, which the optimizer may do in several parts.

    The guard is called once per step, when the optimizer is about to update; if it answers False,
    gradients are hidden from the optimizer until the part is over.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.refused = False
        """Whether the guard has refused the latest step."""
        self._ask: Callable[[], bool] | None = None
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def arm(self, should_step: StepGuard | None, norm: Callable[[], float]) -> None:
        """Let `should_step(norm())` decide about the next step; without it, it happens."""
        self.refused = False
        self._ask = None if should_step is None else lambda: should_step(norm())

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._ask is not None:
            ask, self._ask = self._ask, None
            self.refused = not ask()
        if not self.refused:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
