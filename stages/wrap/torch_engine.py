"""An engine that is a torch module and a torch optimizer: its step, and its training state."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline import (
    WEIGHT,
    Engine,
    EngineState,
    Fragment,
    LossParts,
    Measure,
    MicroBatch,
    Objective,
    OptimizerPart,
    OptimizerPlan,
    Precision,
    StepGuard,
    StepReport,
    Unit,
    dtype_name,
)
from pipeline.checkpoint import Tile
from pipeline.utils import HostCopy, local_part
from stages.objectives.judge import StepSums
from stages.wrap.build import dtype_names, named_parts, parameter_count
from stages.wrap.compute_cast import installed_casts
from stages.wrap.gradients import LossScaler, multiply, total_norm
from stages.wrap.load_weights import flat, stored_tensors
from stages.wrap.optimizer_groups import LivePart, grouped_state
from stages.wrap.optimizer_state import (
    declared_state,
    read_moments,
    require_known,
    set_updates,
    start_state,
    updates,
    write_moments,
)
from stages.wrap.passes import Passes
from stages.wrap.shards import tiles_of
from stages.wrap.torch_compat import divides_gradients, step_divided


class _State(NamedTuple):
    """The optimizer state of a parameter, and the part of the plan that it belongs to."""

    part: OptimizerPart
    optimizer: Optimizer
    parameter: nn.Parameter

    @property
    def values(self) -> dict[str, Any]:
        """The parameter's state in the optimizer, which may make a new mapping in each update."""
        found: dict[str, Any] = self.optimizer.state[self.parameter]
        return found


class _Stored(NamedTuple):
    """A tensor of the training state, which may be sharded, and its optimizer state."""

    name: str
    tiles: list[Tile]
    tensor: Tensor
    state: _State | None
    """None for a tensor that is not trained."""


class _Layout(NamedTuple):
    """The part of the training state that never changes: which tensors there are, and where."""

    fixed: EngineState
    trained: dict[str, _State]
    """Optimizer state of every trained parameter that has elements, by its name."""
    tensors: list[_Stored]


class TorchEngine(Engine):
    """Steps as plain torch does; its training state is read parameter by parameter, each whole or
    sharded. Without more, a model on every rank that nothing wraps: one process's, one that is not
    trained, or a trace's."""

    _restored: Mapping[str, int] = {}
    """Updates of each parameter when the state was restored."""
    _applied = 0
    """Updates since then, for optimizers that keep no count."""

    def __init__(
        self,
        passes: Passes,
        optimizers: Sequence[LivePart],
        precision: Precision,
        plan: OptimizerPlan,
        whole: nn.Module | None = None,
    ) -> None:
        """`whole` stands for the whole model, without memory, where ranks have parts of it."""
        self.passes = passes
        self.parts, self.device = passes.parts, passes.device
        self.data_axis = passes.here.data
        self.random_stream, self.random_streams = passes.here.stream, passes.axes.streams
        self.optimizers = optimizers
        self.plan = plan
        self._whole = whole
        scaling = precision.loss_scaling
        self.scaler = None if scaling is None else LossScaler(scaling)

    @property
    def averaged_over(self) -> int:
        """Number of ranks over whose gradients the strategy averages. The loss is multiplied by it,
        so that they are summed, and the sum stays in the range of narrow dtypes."""
        return self.passes.axes.data * self.passes.axes.context

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """Surround one forward and backward; `last` is True for the final one of a step, in which
        gradients have to be reduced over ranks."""
        return nullcontext()

    def accumulate(
        self, batches: Iterable[MicroBatch], objective: Objective, *, counts: Mapping[Unit, float]
    ) -> LossParts:
        factor = self.averaged_over * (1.0 if self.scaler is None else self.scaler.scale)
        sums = StepSums(objective, self.device, counts, factor=factor)
        return self.passes.train(batches, sums, self.microbatch, Tensor.backward)

    def evaluate(self, batches: Iterable[MicroBatch], measure: Measure) -> Generator[Tensor | None]:
        return self.passes.evaluate(batches, measure)

    def common_facts(self) -> dict[str, Any]:
        """The part of `describe` that all such engines share; parameters have to be sharded."""
        parameters = [one for part in self.parts for one in part.parameters()]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        master = dtype_names(trained)
        buffers = [one for part in self.parts for one in part.buffers()]
        casts = {dtype_name(cast.dtype) for cast in installed_casts(self.parts[0])}
        return {
            "world_size": self.passes.axes.ranks,
            "axes": self.passes.axes.sizes,
            "compute": sorted(casts) or master or dtype_names(parameters),
            "reduce": master,
            "model": type(self.parts[0]).__name__,
            "optimizer": " + ".join(type(one.optimizer).__name__ for one in self.optimizers),
            "device": parameters[0].device.type,
            "master": master,
            "buffers": dtype_names(buffers),
            "parameters": sum(map(parameter_count, self.parts)),
            "trained_parameters": sum(parameter.numel() for parameter in trained),
            "loss_scaling": self.scaler is not None,
        }

    def step(
        self, *, lr_scales: Sequence[float], should_step: StepGuard | None = None
    ) -> StepReport:
        self.announce_change()
        scaler, gradients = self.scaler, list[list[Tensor]]()
        for number, _, optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * lr_scales[number]
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            gradients.append([one.grad for one in parameters if one.grad is not None])
        scale = 1.0 if scaler is None else scaler.scale
        norm = self.gradient_norm(list(itertools.chain(*gradients))) / scale
        sent = HostCopy(norm)
        overflowed = scaler is not None and not math.isfinite(sent)
        # Without a guard and loss scaling the host waits for nothing.
        applied = not overflowed and (should_step is None or should_step(float(sent)))
        if applied:
            self._update(gradients, norm, scale)
        if scaler is not None:
            scaler.update(overflowed=overflowed)
        for _, _, optimizer in self.optimizers:
            optimizer.zero_grad()
        self._applied += applied
        return StepReport(grad_norm=sent, applied=applied, loss_scale=scale)

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Norm of the whole model's gradient, of which this rank has `gradients` (collective)."""
        return total_norm(gradients)

    def _update(self, gradients: list[list[Tensor]], norm: Tensor, scale: float) -> None:
        """Update each part by its gradients divided by the loss scale, and scaled down to the
        largest norm. torch's fused kernels do so themselves, and leave out gradients that are not
        finite."""
        limit, divisor = self.plan.max_grad_norm, None
        if limit is not None:
            # As torch.nn.utils.clip_grad_norm_ does.
            divisor = torch.clamp((norm + 1e-6) / limit, min=1.0) * scale
        elif scale != 1.0:
            divisor = torch.full_like(norm, scale)
        for (_, part, optimizer), own in zip(self.optimizers, gradients, strict=True):
            # The first update here shows what the rule keeps.
            watched = nullcontext() if self._applied else declared_state(optimizer, part)
            with watched:
                if divides_gradients(optimizer):
                    step_divided(optimizer, divisor, left_out=~torch.isfinite(norm))
                    continue
                if divisor is not None:
                    multiply(own, divisor.reciprocal())
                optimizer.step()

    def state(self) -> EngineState:
        fixed = self._layout.fixed
        names = itertools.chain.from_iterable(group.parameters for group in fixed.groups)
        # Of those restored and those made since.
        counts = {name: self._restored.get(name, 0) + self._applied for name in names}
        for name, own in self._layout.trained.items():
            optimizer, parameter = type(own.optimizer).__name__, local_part(own.parameter)
            require_known(own.values, own.part, optimizer, parameter)
            counts[name] = updates(own.values, counts[name])
        return dataclasses.replace(
            fixed,
            updates=counts,
            loss_scale=None if self.scaler is None else self.scaler.state,
        )

    def fragments(self) -> Iterator[Fragment]:
        yield from self._fragments(write=False)

    @property
    def lasting_fragments(self) -> bool:
        # Moments in few bits are unpacked into copies.
        return all(part.packing is None for part in self.plan.parts)

    def restore(self, state: EngineState) -> Iterator[Fragment]:
        self.announce_change()
        self._restored, self._applied = state.updates, 0
        for name, own in self._layout.trained.items():
            set_updates(own.values, state.updates[name])
        if self.scaler is not None and state.loss_scale is not None:
            self.scaler.restore(state.loss_scale)
        yield from self._fragments(write=True)

    def sync_compute_weights(self) -> None:
        """Nothing to do: the parameters are the masters."""

    def describe(self) -> Mapping[str, Any]:
        return {"engine": "none", **self.common_facts()}

    def to_sharded(self) -> None:
        """Reshard parameters that are gathered, as they are read and written sharded."""

    @functools.cached_property
    def _layout(self) -> _Layout:
        """Places of the state, found once: parameters stay the same objects, though not always in
        the same memory."""
        self.to_sharded()
        for _, part, optimizer in self.optimizers:
            start_state(optimizer, part)
        tensors = {name: one for part in self.parts for name, one in stored_tensors(part)}
        owners = {
            parameter: (part, optimizer)
            for _, part, optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        trained = {
            name: _State(*owners[one], one)
            for part in self.parts
            for name, one in part.named_parameters()
            if one.requires_grad and one.numel()
        }
        stored = [
            _Stored(name, found, tensor, trained.get(name))
            for name, tensor in tensors.items()
            if (found := tiles_of(name, tensor))
        ]
        whole = self._whole or self.parts[0]
        fixed = grouped_state(whole, self.plan, named_parts(whole, self.parts))
        return _Layout(fixed, trained, stored)

    def _fragments(self, *, write: bool) -> Iterator[Fragment]:
        self.to_sharded()
        for name, own, tensor, state in self._layout.tensors:
            weight, moments, end = flat(tensor), {}, 0
            values = {} if state is None else state.values
            if state is not None:
                moments = read_moments(values, state.part, 0, weight.numel())
            for tile in own:
                begin, end = end, end + tile.numel
                live = {WEIGHT: weight, **moments}
                yield Fragment(
                    name=name,
                    shape=tuple(tensor.shape),
                    start=tile.start,
                    state={kind: values[begin:end] for kind, values in live.items()},
                    stride=tile.stride,
                    count=tile.count,
                )
            if write and state is not None:
                write_moments(values, state.part, moments)
