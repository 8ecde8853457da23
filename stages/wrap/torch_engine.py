"""An engine that is a torch module and a torch optimizer: its step, and its training state."""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pipeline import (
    WEIGHT,
    Context,
    DataAxis,
    Engine,
    EngineState,
    Fragment,
    LossScale,
    OptimizerPlan,
    Precision,
    StepGuard,
    StepReport,
    dtype_name,
)
from stages.wrap.build import dtype_names, named_parameters, parameter_count
from stages.wrap.compute_cast import installed_casts
from stages.wrap.load_weights import flat, stored_tensors
from stages.wrap.optimizer_state import (
    fixed_state,
    read_moments,
    require_known,
    set_updates,
    start_state,
    updates,
    write_moments,
)
from stages.wrap.shards import Span, spans


class _Stored(NamedTuple):
    """A tensor of the training state, which may be sharded, and its optimizer state."""

    name: str
    spans: list[Span]
    tensor: Tensor
    state: dict[str, Any] | None
    """Optimizer state; None for a tensor that is not trained."""


class _Layout(NamedTuple):
    """The part of the training state that never changes: which tensors there are, and where."""

    fixed: EngineState
    trained: dict[str, dict[str, Any]]
    """Optimizer state of every trained parameter, by its name."""
    tensors: list[_Stored]


class TorchEngine(Engine):
    """Steps as plain torch does; its training state is read parameter by parameter, each whole or
    sharded."""

    keeps_gradients = False
    """Whether gradients are zeroed where they are after a step, instead of being freed."""
    _restored: Mapping[str, int] = {}
    """Updates of each parameter when the state was restored."""
    _applied = 0
    """Updates since then, for optimizers that keep no count."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        ctx: Context,
        precision: Precision,
        plan: OptimizerPlan,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.plan = plan
        self.device = ctx.dist.device
        self.data_axis = DataAxis(index=ctx.dist.rank, count=ctx.dist.world_size)
        self.scaler = make_scaler(precision, next(model.parameters()).device)

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The model itself, with names as in the source."""

    def common_facts(self) -> dict[str, Any]:
        """The part of `describe` that all such engines share; parameters have to be sharded."""
        parameters = list(self.module.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        master = dtype_names(trained)
        casts = {dtype_name(cast.dtype) for cast in installed_casts(self.module)}
        return {
            "world_size": self.data_axis.count,
            "compute": sorted(casts) or master,
            "reduce": master,
            "model": type(self.module).__name__,
            "optimizer": type(self.optimizer).__name__,
            "device": parameters[0].device.type,
            "master": master,
            "buffers": dtype_names(self.module.buffers()),
            "parameters": parameter_count(self.module),
            "trained_parameters": sum(parameter.numel() for parameter in trained),
            "loss_scaling": self.scaler is not None,
        }

    def backward(self, loss: Tensor) -> None:
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]

    def step(self, *, lr_scale: float, should_step: StepGuard | None = None) -> StepReport:
        optimizer, scaler = self.optimizer, self.scaler
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_scale
        if scaler is not None:
            scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = clip(parameters, self.plan.max_grad_norm)
        # Without a guard the host starts the update without waiting for the norm.
        applied, scale = should_step is None or should_step(float(norm)), 1.0
        if scaler is None:
            if applied:
                optimizer.step()
        else:
            scale = scaler.get_scale()
            if applied:
                scaler.step(optimizer)
            scaler.update()  # halves the scale if `unscale_` found a gradient that is not finite
            applied = applied and scaler.get_scale() >= scale
        optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        self._applied += applied
        return StepReport(grad_norm=float(norm), applied=applied, loss_scale=scale)

    def state(self) -> EngineState:
        return dataclasses.replace(
            self._layout.fixed,
            updates={
                name: updates(state, self._restored.get(name, 0) + self._applied)
                for name, state in self._layout.trained.items()
            },
            loss_scale=None if self.scaler is None else _loss_scale(self.scaler),
        )

    def fragments(self) -> Iterator[Fragment]:
        yield from self._fragments(write=False)

    def restore(self, state: EngineState) -> Iterator[Fragment]:
        self._restored, self._applied = state.updates, 0
        for name, own in self._layout.trained.items():
            set_updates(own, state.updates[name])
        if self.scaler is not None and state.loss_scale is not None:
            _set_loss_scale(self.scaler, state.loss_scale)
        yield from self._fragments(write=True)

    def sync_compute_weights(self) -> None:
        """Nothing to do: the parameters are the masters."""

    def to_sharded(self) -> None:
        """Reshard parameters that are gathered, as they are read and written sharded."""

    @functools.cached_property
    def _layout(self) -> _Layout:
        """Found once: parameters stay the same objects, though not always in the same memory."""
        self.to_sharded()
        start_state(self.optimizer, self.plan)
        tensors = dict(stored_tensors(self.module))
        trained = dict(self._trained())
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        groups = [
            (group, group["initial_lr"], [names[p] for p in group["params"] if p.numel()])
            for group in self.optimizer.param_groups
        ]
        fixed = fixed_state(self.module, self.plan, groups, lambda tensor: tuple(tensor.shape))
        stored = []
        for name, tensor in tensors.items():
            found = spans(name, tensor)
            if found:
                stored.append(_Stored(name, found, tensor, trained.get(name)))
        return _Layout(fixed, trained, stored)

    def _fragments(self, *, write: bool) -> Iterator[Fragment]:
        self.to_sharded()
        for name, own, tensor, state in self._layout.tensors:
            weight, moments, end = flat(tensor), {}, 0
            if state is not None:
                moments = read_moments(state, self.plan, 0, weight.numel())
            for span in own:
                begin, end = end, end + span.numel
                live = {WEIGHT: weight, **moments}
                yield Fragment(
                    name=name,
                    shape=tuple(tensor.shape),
                    start=span.start,
                    state={kind: values[begin:end] for kind, values in live.items()},
                    stride=span.stride,
                    count=span.count,
                )
            if write and state is not None:
                write_moments(state, self.plan, moments)

    def _trained(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and optimizer state of every trained parameter that has elements."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and parameter.numel():
                state = self.optimizer.state[parameter]
                require_known(state, self.plan, type(self.optimizer).__name__)
                yield name, state


def make_optimizer(plan: OptimizerPlan, module: nn.Module, *, shard: int = 0) -> Optimizer:
    """The plan's optimizer of the module; each group keeps its base rate as `initial_lr`. `shard`
    is this process's number among those that share a sharded parameter."""
    optimizer = plan.build(plan.groups(named_parameters(module, shard=shard)))
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def make_scaler(precision: Precision, device: torch.device) -> GradScaler | None:
    """The policy's dynamic loss scaler, on the gradients' `device`; None without loss scaling."""
    scaling = precision.loss_scaling
    if scaling is None:
        return None
    scaler = GradScaler(
        device.type, init_scale=scaling.initial_scale, growth_interval=scaling.growth_interval
    )
    # The scale is placed at first use: beside the gradients, not beside an offloaded model's loss.
    scaler.scale(torch.zeros((), device=device))
    return scaler


def clip(parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale gradients down to the global L2 norm `max_norm`; return the norm before, a scalar.

    Norms are accumulated in fp32 over the whole model, on all ranks that hold a part of it.
    """
    norm = _norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm


def _norm(gradients: list[Tensor]) -> Tensor:
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients, foreach=True)
    # torch's foreach norms accumulate in the gradients' own dtype.
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _loss_scale(scaler: GradScaler) -> LossScale:
    state = scaler.state_dict()
    return LossScale(scale=float(state["scale"]), good_steps=int(state["_growth_tracker"]))


def _set_loss_scale(scaler: GradScaler, saved: LossScale) -> None:
    # The growth settings stay those of the recipe.
    good_steps = saved.good_steps % scaler.get_growth_interval()  # it grows at equality alone
    counters = {"scale": saved.scale, "_growth_tracker": good_steps}
    scaler.load_state_dict({**scaler.state_dict(), **counters})
