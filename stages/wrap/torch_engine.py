"""The engine of a torch module and torch optimizers: its micro-batches, its step and its training
state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pipeline import (
    WEIGHT,
    DistContext,
    Engine,
    EngineState,
    Fragment,
    LossParts,
    LossScale,
    Measure,
    MicroBatch,
    Objective,
    OptimizerPlan,
    Precision,
    Scorer,
    StepGuard,
    StepReport,
    Unit,
    dtype_name,
)
from pipeline.checkpoint import Tile
from pipeline.utils import HostCopy, local_part
from stages.batches.layout import padded, sequence_slice
from stages.model.rotary_compat import document_angles, with_positions
from stages.objectives.compat import known_documents
from stages.objectives.cross_entropy import StepSums, measured
from stages.wrap.axes import Axes
from stages.wrap.build import dtype_names, installed_casts, named_parameters, parameter_count
from stages.wrap.optimizer_state import (
    UPDATES,
    LivePart,
    declared_state,
    fixed_state,
    group_state,
    groups_of,
    read_moments,
    require_known,
    set_updates,
    start_state,
    write_moments,
)
from stages.wrap.shards import flat, stored_tensors, tile_fragments, tiles_of
from stages.wrap.torch_compat import multiply, step_divided


def total_norm(gradients: Sequence[Tensor], *, divided: bool = False) -> Tensor:
    """L2 norm over the gradients of all ranks, accumulated in fp32; a scalar (collective, if they
    are DTensors, or `divided`: ranks have different ones, and one may have none). Works across
    meshes: each shard is counted once, by the first rank on the axes that replicate it. Plain
    tensors are the same on every rank."""
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
        norm = torch.nn.utils.get_total_norm(own)
    else:  # torch's foreach norms accumulate in the gradients' own dtype
        norms = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in own]
        norm = torch.linalg.vector_norm(torch.stack(norms))
    if divided or sharded:
        total = norm.square()
        torch.distributed.all_reduce(total)
        return total.sqrt()
    return norm


Around = Callable[[bool], AbstractContextManager[None]]
Backward = Callable[[Tensor], object]


class Passes(ABC):
    """This rank's parts of a model, its place on the axes, and the way of micro-batches through
    both. Without `axes`, all ranks are data-parallel."""

    def __init__(
        self, parts: Sequence[nn.Module], dist: DistContext, axes: Axes | None = None
    ) -> None:
        """`parts` are modules with names as in the source."""
        self.parts, self.device = tuple(parts), dist.device
        self.axes = axes or Axes(data=dist.world_size)
        self.here = self.axes.coordinates(dist.rank)
        self.counts_rows = self.here.tensor == 0 and self.here.context == 0
        """Whether sums and rows are this rank's to return, of all that compute them alike."""
        self._by_length = any(map(document_angles, self.parts))
        """Whether the model has to know how long each document is."""

    @abstractmethod
    def train(
        self, batches: Iterable[MicroBatch], sums: StepSums, around: Around, backward: Backward
    ) -> LossParts:
        """Run forward and backward of a step; returns this rank's part of each sum. Where
        micro-batches pass one after another, `around(last)` surrounds each, and `backward` is
        called with its loss."""

    @abstractmethod
    def evaluate(self, batches: Iterable[MicroBatch], measure: Measure) -> Generator[Tensor | None]:
        """See `Engine.evaluate`."""

    def laid_out(self, batch: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
        """The micro-batch padded to a length that the axes divide, and this rank's part of it: all
        of it, or its slice of the tokens."""
        context = self.axes.context
        whole = padded(batch, context * self.axes.tensor)
        if self._by_length:
            whole = with_positions(whole)
        own = whole if context == 1 else sequence_slice(whole, self.here.context, context)
        return whole, own


class ModulePasses(Passes):
    """Runs micro-batches one after another through one module, the whole model."""

    def __init__(
        self, module: nn.Module, scorer: Scorer, dist: DistContext, axes: Axes | None = None
    ) -> None:
        super().__init__([module], dist, axes)
        self._scorer = scorer

    def train(
        self, batches: Iterable[MicroBatch], sums: StepSums, around: Around, backward: Backward
    ) -> LossParts:
        rest = iter(batches)
        batch = next(rest, None)
        while batch is not None:
            following = next(rest, None)
            whole, own = self.laid_out(batch)
            with around(following is None), known_documents(own):
                backward(sums.judge(self._scorer, own, whole))
            batch = following
        return sums.part(counted=self.counts_rows)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], measure: Measure) -> Generator[Tensor | None]:
        with evaluating(self.parts):
            for batch in batches:
                whole, own = self.laid_out(batch)
                with known_documents(own):
                    rows = measured(measure, self._scorer, own, whole)
                yield rows if self.counts_rows else None


@contextlib.contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode in the body, and back into training mode."""
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in modules:
            module.train()


_Stored = tuple[str, Tensor, list[Tile], LivePart | None]
"""Name of a tensor of the training state; the tensor, which may be sharded; its elements on this
rank, empty without any; the part of the plan that updates it, None for one that is not trained."""


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
        self.random_stream = passes.here.stream
        self.random_streams = passes.axes.ranks // passes.axes.tensor
        self._whole, self._scaling = whole, precision.loss_scaling
        scale = 1.0 if self._scaling is None else self._scaling.initial_scale
        self.loss_scale = LossScale(scale=scale, good_steps=0)
        """The factor by which losses are multiplied now; 1 without loss scaling."""

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """Surround one forward and backward; in the `last` of a step, gradients must be reduced
        over ranks."""
        return nullcontext()

    def accumulate(
        self, batches: Iterable[MicroBatch], objective: Objective, *, counts: Mapping[Unit, float]
    ) -> LossParts:
        factor = self.averaged_over * self.loss_scale.scale
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
            "loss_scaling": self._scaling is not None,
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
        scale = self.loss_scale.scale
        norm = self.gradient_norm(list(itertools.chain(*gradients))) / scale
        sent = HostCopy(norm)
        overflowed = self._scaling is not None and not math.isfinite(sent)
        # Without a guard and loss scaling the host waits for nothing.
        applied = not overflowed and (should_step is None or should_step(float(sent)))
        if applied:
            # Each part by its gradients divided by the loss scale, and scaled down to the largest
            # norm. torch's fused kernels do both, and leave out gradients that are not finite.
            limit, divisor = self.plan.max_grad_norm, None
            if limit is not None:
                # As torch.nn.utils.clip_grad_norm_ does.
                divisor = torch.clamp((norm + 1e-6) / limit, min=1.0) * scale
            elif scale != 1.0:
                divisor = torch.full_like(norm, scale)
            for (_, part, optimizer), own in zip(self.optimizers, gradients, strict=True):
                # The first update shows what the rule keeps.
                with nullcontext() if self._applied else declared_state(optimizer, part):
                    if step_divided(optimizer, divisor, norm):
                        continue
                    if divisor is not None:
                        multiply(own, divisor.reciprocal())
                    optimizer.step()
        self._adjust_scale(overflowed=overflowed)
        for live in self.optimizers:
            live.optimizer.zero_grad()
        self._applied += applied
        return StepReport(grad_norm=sent, applied=applied, loss_scale=scale)

    def _adjust_scale(self, *, overflowed: bool) -> None:
        """Dynamic loss scaling (Micikevicius et al. 2018, Mixed Precision Training, section 3.2):
        after a step, halve the factor by which losses are multiplied, so that gradients stay in the
        range of fp16, if one overflowed, and double it after `growth_interval` steps without."""
        if self._scaling is None:
            return
        scale, good_steps = self.loss_scale.scale, self.loss_scale.good_steps + 1
        if overflowed:
            scale, good_steps = scale / 2, 0
        elif good_steps == self._scaling.growth_interval:
            scale, good_steps = scale * 2, 0
        self.loss_scale = LossScale(scale=scale, good_steps=good_steps)

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Norm of the whole model's gradient; this rank has `gradients` of it (collective)."""
        return total_norm(gradients)

    def state(self) -> EngineState:
        fixed, stored = self._layout
        made = self._applied  # since the state was restored
        names = itertools.chain.from_iterable(group.parameters for group in fixed.groups)
        counts = {name: self._restored.get(name, 0) + made for name in names}
        for name, tensor, _, live in stored:
            if live is not None:
                state, rule = live.optimizer.state[tensor], type(live.optimizer).__name__
                require_known(state, live.plan, rule, local_part(tensor))
                counts[name] = int(state.get(UPDATES, counts[name]))
        scale = None if self._scaling is None else self.loss_scale
        return dataclasses.replace(fixed, updates=counts, loss_scale=scale)

    def fragments(self) -> Iterator[Fragment]:
        return self._fragments(write=False)

    @property
    def averaged_over(self) -> int:
        """Ranks over which the strategy averages gradients. The loss is multiplied by their number,
        so that gradients are summed, and stay in the range of narrow dtypes."""
        return self.passes.axes.data * self.passes.axes.context

    @property
    def lasting_fragments(self) -> bool:
        # Moments in few bits are unpacked into copies.
        return all(part.packing is None for part in self.plan.parts)

    def restore(self, state: EngineState) -> Iterator[Fragment]:
        self.announce_change()
        self._restored, self._applied = state.updates, 0
        if self._scaling is not None and (saved := state.loss_scale) is not None:
            good_steps = saved.good_steps % self._scaling.growth_interval  # of the recipe
            self.loss_scale = dataclasses.replace(saved, good_steps=good_steps)
        yield from self._fragments(write=True)

    def sync_compute_weights(self) -> None:
        """Nothing to do: the parameters are the masters."""

    def describe(self) -> Mapping[str, Any]:
        return {"engine": "none", **self.common_facts()}

    def to_sharded(self) -> None:
        """Reshard gathered parameters, which are read and written sharded; after a forward pass
        without backward (evaluation) some may remain."""
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

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
        stored = [(n, one, tiles_of(n, one), owners.get(one)) for n, one in tensors.items()]
        whole = self._whole or self.parts[0]
        held = [one for one in named_parameters(whole, self.parts) if one.parameter.numel()]
        names = {one.parameter: one.name for one in held}
        groups = [
            group_state(part, group, [names[one] for one in group["params"]])
            for part, own in zip(self.plan.parts, self.plan.divide(held), strict=True)
            for group in (groups_of(part, own) if own else ())
        ]
        return fixed_state(whole, groups), stored

    def _fragments(self, *, write: bool) -> Iterator[Fragment]:
        """See `Engine.fragments`; with `write`, what the reader writes into them is kept."""
        self.to_sharded()
        for name, tensor, tiles, live in self._layout[1]:
            state, moments = {WEIGHT: flat(tensor)}, dict[str, Tensor]()
            if write and live is not None:
                set_updates(live.optimizer.state[tensor], self._restored[name])
            if live is not None and tiles:
                own = live.optimizer.state[tensor]
                moments = read_moments(own, live.plan, 0, state[WEIGHT].numel())
            yield from tile_fragments(name, tensor.shape, tiles, state | moments)
            if write and live is not None and tiles:
                write_moments(live.optimizer.state[tensor], live.plan, moments)
