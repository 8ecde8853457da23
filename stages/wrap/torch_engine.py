"""The engine of a torch module and torch optimizers: its step and its training state."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline import (
    WEIGHT,
    Engine,
    EngineState,
    Fragment,
    LossParts,
    LossScale,
    LossScaling,
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
from pipeline.checkpoint import Tile
from pipeline.utils import HostCopy, local_part
from stages.objectives.cross_entropy import StepSums
from stages.wrap.build import dtype_names, installed_casts, parameter_count
from stages.wrap.optimizer_state import (
    LivePart,
    declared_state,
    grouped_state,
    read_moments,
    require_known,
    set_updates,
    start_state,
    updates,
    write_moments,
)
from stages.wrap.passes import Passes
from stages.wrap.shards import flat, stored_tensors, tile_fragments, tiles_of
from stages.wrap.torch_compat import divides_gradients, multiply, norms_of, step_divided


def total_norm(gradients: Sequence[Tensor], *, divided: bool = False) -> Tensor:
    """L2 norm over the gradients of all ranks, accumulated in fp32; a scalar (collective, if they
    are DTensors, or `divided`: ranks have different ones, and one may have none).

    Works across meshes: each shard is counted once, by the first rank on the axes that replicate
    it. Plain tensors are the same on every rank.
    """
    sharded = [one for one in gradients if isinstance(one, DTensor)]
    repeated = {
        id(one)
        for one in sharded
        for axis, placement in enumerate(one.placements)
        if placement.is_replicate() and one.device_mesh.get_local_rank(axis)
    }
    own = [local_part(one) for one in gradients if id(one) not in repeated]
    own = [one for one in own if one.numel()]
    if not own:
        norm = torch.zeros((), device=local_part(gradients[0]).device if gradients else "cpu")
    elif all(one.dtype == torch.float32 for one in own):
        norm = torch.linalg.vector_norm(torch.stack([*norms_of(own)]))
    else:  # torch's foreach norms accumulate in the gradients' own dtype
        norms = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in own]
        norm = torch.linalg.vector_norm(torch.stack(norms))
    if divided or sharded:
        total = norm.square()
        torch.distributed.all_reduce(total)
        return total.sqrt()
    return norm


GROWTH, BACKOFF = 2.0, 0.5


class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018, Mixed Precision Training, section 3.2): the
    factor by which losses are multiplied, so that gradients stay in the range of fp16. It is halved
    when a gradient overflows, and doubled after `growth_interval` steps without."""

    def __init__(self, scaling: LossScaling) -> None:
        self.scale, self._good_steps = scaling.initial_scale, 0
        self._interval = scaling.growth_interval

    def update(self, *, overflowed: bool) -> None:
        """Adjust the scale after a step."""
        self._good_steps = 0 if overflowed else self._good_steps + 1
        if overflowed:
            self.scale *= BACKOFF
        elif self._good_steps == self._interval:
            self.scale *= GROWTH
            self._good_steps = 0

    @property
    def state(self) -> LossScale:
        """State for a checkpoint."""
        return LossScale(scale=self.scale, good_steps=self._good_steps)

    def restore(self, saved: LossScale) -> None:
        """Continue from a checkpoint. The interval stays the recipe's."""
        self.scale, self._good_steps = saved.scale, saved.good_steps % self._interval


class _Stored(NamedTuple):
    """A tensor of the training state, which may be sharded."""

    name: str
    tensor: Tensor
    tiles: list[Tile]
    """Its elements on this rank; empty without any."""
    live: LivePart | None
    """Part of the plan that updates it; None for a tensor that is not trained."""


class TorchEngine(Engine):
    """Steps as plain torch does, with a training state that is read parameter by parameter, each
    whole or sharded. By itself it is a model on every rank that nothing wraps."""

    _restored: Mapping[str, int] = {}
    """Updates of each parameter when the state was restored."""
    _applied = 0
    """Updates since then, for optimizers that keep no count."""

    def __init__(
        self, passes: Passes, optimizers: Sequence[LivePart], precision: Precision,
        plan: OptimizerPlan, whole: nn.Module | None = None,
    ) -> None:  # fmt: skip
        """`whole` is the whole model on the meta device, where ranks have parts of it."""
        self.passes, self.optimizers, self.plan = passes, optimizers, plan
        self.parts, self.device = passes.parts, passes.device
        self.data_axis = passes.here.data
        self.random_stream, self.random_streams = passes.here.stream, passes.axes.streams
        scaling = precision.loss_scaling
        self.scaler = None if scaling is None else LossScaler(scaling)
        self._whole = whole

    @property
    def averaged_over(self) -> int:
        """Ranks over which the strategy averages gradients. The loss is multiplied by their number,
        so that gradients are summed, and stay in the range of narrow dtypes."""
        return self.passes.axes.data * self.passes.axes.context

    @property
    def _scale(self) -> float:
        """The factor by which losses are multiplied now; 1 without loss scaling."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """Surround one forward and backward; in the `last` of a step, gradients must be reduced
        over ranks."""
        return nullcontext()

    def accumulate(
        self, batches: Iterable[MicroBatch], objective: Objective, *, counts: Mapping[Unit, float]
    ) -> LossParts:
        factor = self.averaged_over * self._scale
        sums = StepSums(objective, self.device, counts, factor=factor)
        return self.passes.train(batches, sums, self.microbatch, Tensor.backward)

    def evaluate(self, batches: Iterable[MicroBatch], measure: Measure) -> Generator[Tensor | None]:
        return self.passes.evaluate(batches, measure)

    def common_facts(self) -> dict[str, Any]:
        """The facts of `describe` that all torch engines share. Parameters must be sharded."""
        parameters = [one for part in self.parts for one in part.parameters()]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        master = dtype_names(trained)
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
            "buffers": dtype_names(one for part in self.parts for one in part.buffers()),
            "parameters": sum(map(parameter_count, self.parts)),
            "trained_parameters": sum(parameter.numel() for parameter in trained),
            "loss_scaling": self.scaler is not None,
        }

    def step(
        self, *, lr_scales: Sequence[float], should_step: StepGuard | None = None
    ) -> StepReport:
        self.announce_change()
        gradients: list[list[Tensor]] = []
        for number, _, optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * lr_scales[number]
            parameters = (one for group in optimizer.param_groups for one in group["params"])
            gradients.append([one.grad for one in parameters if one.grad is not None])
        scale = self._scale
        norm = self.gradient_norm(list(itertools.chain(*gradients))) / scale
        sent = HostCopy(norm)
        overflowed = self.scaler is not None and not math.isfinite(sent)
        # Without a guard and loss scaling the host waits for nothing.
        applied = not overflowed and (should_step is None or should_step(float(sent)))
        if applied:
            self._update(gradients, norm, scale)
        if self.scaler is not None:
            self.scaler.update(overflowed=overflowed)
        for live in self.optimizers:
            live.optimizer.zero_grad()
        self._applied += applied
        return StepReport(grad_norm=sent, applied=applied, loss_scale=scale)

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Norm of the whole model's gradient; this rank has `gradients` of it (collective)."""
        return total_norm(gradients)

    def _update(self, gradients: list[list[Tensor]], norm: Tensor, scale: float) -> None:
        """Update each part by its gradients divided by the loss scale, and scaled down to the
        largest norm. torch's fused kernels do both, and leave out gradients that are not finite."""
        limit, divisor = self.plan.max_grad_norm, None
        if limit is not None:
            # As torch.nn.utils.clip_grad_norm_ does.
            divisor = torch.clamp((norm + 1e-6) / limit, min=1.0) * scale
        elif scale != 1.0:
            divisor = torch.full_like(norm, scale)
        for (_, part, optimizer), own in zip(self.optimizers, gradients, strict=True):
            # The first update shows what the rule keeps.
            with nullcontext() if self._applied else declared_state(optimizer, part):
                if divides_gradients(optimizer):
                    step_divided(optimizer, divisor, left_out=~torch.isfinite(norm))
                    continue
                if divisor is not None:
                    multiply(own, divisor.reciprocal())
                optimizer.step()

    def state(self) -> EngineState:
        fixed, stored = self._layout
        made = self._applied  # since the state was restored
        names = itertools.chain.from_iterable(group.parameters for group in fixed.groups)
        counts = {name: self._restored.get(name, 0) + made for name in names}
        for name, tensor, _, live in stored:
            if live is not None:
                state, rule = live.state(tensor), type(live.optimizer).__name__
                require_known(state, live.plan, rule, local_part(tensor))
                counts[name] = updates(state, counts[name])
        scale = None if self.scaler is None else self.scaler.state
        return dataclasses.replace(fixed, updates=counts, loss_scale=scale)

    def fragments(self) -> Iterator[Fragment]:
        yield from self._fragments(write=False)

    @property
    def lasting_fragments(self) -> bool:
        # Moments in few bits are unpacked into copies.
        return all(part.packing is None for part in self.plan.parts)

    def restore(self, state: EngineState) -> Iterator[Fragment]:
        self.announce_change()
        self._restored, self._applied = state.updates, 0
        for name, tensor, _, live in self._layout[1]:
            if live is not None:
                set_updates(live.state(tensor), state.updates[name])
        if self.scaler is not None and state.loss_scale is not None:
            self.scaler.restore(state.loss_scale)
        yield from self._fragments(write=True)

    def sync_compute_weights(self) -> None:
        """Nothing to do: the parameters are the masters."""

    def describe(self) -> Mapping[str, Any]:
        return {"engine": "none", **self.common_facts()}

    def to_sharded(self) -> None:
        """Reshard gathered parameters, which are read and written sharded."""

    @functools.cached_property
    def _layout(self) -> tuple[EngineState, list[_Stored]]:
        """The part of the training state that never changes, and all of its tensors. Parameters
        stay the same objects, though not always in the same memory."""
        self.to_sharded()
        owners: dict[Tensor, LivePart] = {}
        for live in self.optimizers:
            start_state(live.optimizer, live.plan)
            for group in live.optimizer.param_groups:
                owners |= {one: live for one in group["params"] if one.numel()}
        tensors = {name: one for part in self.parts for name, one in stored_tensors(part)}
        stored = [
            _Stored(name, one, tiles_of(name, one), owners.get(one))
            for name, one in tensors.items()
        ]
        return grouped_state(self._whole or self.parts[0], self.plan, self.parts), stored

    def _fragments(self, *, write: bool) -> Iterator[Fragment]:
        self.to_sharded()
        for name, tensor, tiles, live in self._layout[1]:
            state, moments = {WEIGHT: flat(tensor)}, dict[str, Tensor]()
            if live is not None and tiles:
                own = live.state(tensor)
                moments = read_moments(own, live.plan, 0, state[WEIGHT].numel())
            yield from tile_fragments(name, tensor.shape, tiles, state | moments)
            if write and live is not None and tiles:
                write_moments(live.state(tensor), live.plan, moments)
