"""An engine that is a torch module and a torch optimizer: its step, and its whole state."""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from pipeline.contracts.engine import (
    WEIGHT,
    Engine,
    EngineState,
    Fragment,
    LossScale,
    ParameterGroup,
    StepGuard,
    StepReport,
)
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.errors import StageError
from stages.wrap.load_weights import Part
from stages.wrap.materialize import aliases, dtype_names, parameter_count, stored_tensors
from stages.wrap.optimizer_state import (
    flat,
    read_moments,
    require_known,
    set_updates,
    start_state,
    updates,
    write_moments,
)
from stages.wrap.optimizer_step import apply_step, scaled


class _Part(NamedTuple):
    """What a fragment is made of: a tensor, which may be sharded, and its optimizer state."""

    name: str
    start: int
    tensor: Tensor
    kept: dict[str, Any] | None
    """None: not trained."""


class _Layout(NamedTuple):
    """Where an engine's training state is: what never changes of it."""

    state: EngineState
    trained: dict[str, dict[str, Any]]
    """Optimizer state of every trained parameter."""
    parts: list[_Part]


class TorchEngine(Engine):
    """Steps as plain torch does, and tells its training state parameter by parameter, sharded by
    rows or whole."""

    optimizer: Optimizer
    scaler: GradScaler | None
    plan: OptimizerPlan
    keeps_gradients = False
    """Whether gradients stay where they are between steps, as zeros, instead of being freed."""
    _restored: Mapping[str, int] = {}
    _applied = 0
    """Steps since then: counts of updates, for optimizers that have none."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The model itself, with names as in the source."""

    def common_facts(self) -> dict[str, Any]:
        """What `facts` says of every such engine. Not of shards that are gathered."""
        parameters = list(self.module.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return {
            "model": type(self.module).__name__,
            "optimizer": type(self.optimizer).__name__,
            "device": parameters[0].device.type,
            "master": dtype_names(trained),
            "buffers": dtype_names(self.module.buffers()),
            "parameters": parameter_count(self.module),
            "trained_parameters": sum(parameter.numel() for parameter in trained),
            "loss_scaling": self.scaler is not None,
        }

    def backward(self, loss: Tensor) -> None:
        scaled(loss, self.scaler).backward()  # type: ignore[no-untyped-call]

    def step(self, *, lr_scale: float, should_step: StepGuard | None = None) -> StepReport:
        report = apply_step(
            self.optimizer,
            self.scaler,
            lr_scale=lr_scale,
            max_grad_norm=self.plan.max_grad_norm,
            should_step=should_step,
            keep_gradients=self.keeps_gradients,
        )
        self._applied += report.applied
        return report

    def state(self) -> EngineState:
        return dataclasses.replace(
            self._layout.state,
            updates={
                name: updates(kept, self._restored.get(name, 0) + self._applied)
                for name, kept in self._layout.trained.items()
            },
            loss_scale=None if self.scaler is None else _loss_scale(self.scaler),
        )

    def fragments(self) -> Iterator[Fragment]:
        yield from self._fragments(write=False)

    def restore(self, state: EngineState) -> Iterator[Fragment]:
        self._restored, self._applied = state.updates, 0
        for name, kept in self._layout.trained.items():
            set_updates(kept, state.updates[name], self.optimizer)
        if self.scaler is not None and state.loss_scale is not None:
            _set_loss_scale(self.scaler, state.loss_scale)
        yield from self._fragments(write=True)

    def sync_compute_weights(self) -> None:
        """Masters are the parameters themselves."""

    def to_sharded(self) -> None:
        """Bring parameters into the form in which they are read and written, if they can be in
        another."""

    @functools.cached_property
    def _layout(self) -> _Layout:
        """Found once: parameters stay the same objects, though not always in the same memory."""
        self.to_sharded()
        start_state(self.optimizer, self.plan)
        tensors = dict(stored_tensors(self.module))
        trained = dict(self._trained())
        state = EngineState(
            shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
            aliases=aliases(self.module),
            frozen=[n for n, p in self.module.named_parameters() if not p.requires_grad],
            groups=[self._group(group) for group in self.optimizer.param_groups],
            updates={},
            moments=tuple(self.plan.moments),
            loss_scale=None,
        )
        parts = []
        for name, tensor in tensors.items():
            start, length = local_span(name, tensor)
            if length:
                parts.append(_Part(name, start, tensor, trained.get(name)))
        return _Layout(state, trained, parts)

    def _fragments(self, *, write: bool) -> Iterator[Fragment]:
        self.to_sharded()
        for part in self._layout.parts:
            weight, moments = flat(part.tensor), {}
            if part.kept is not None:
                moments = read_moments(part.kept, self.plan, 0, weight.numel())
            yield Fragment(
                name=part.name,
                shape=tuple(part.tensor.shape),
                start=part.start,
                state={WEIGHT: weight, **moments},
            )
            if write and part.kept is not None:
                write_moments(part.kept, self.plan, moments)

    def _trained(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and optimizer state of every trained parameter that has elements."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and parameter.numel():
                state = self.optimizer.state[parameter]
                require_known(state, self.plan, type(self.optimizer).__name__)
                yield name, state

    def _group(self, group: dict[str, Any]) -> ParameterGroup:
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        settings = {key: group[key] for key in self.plan.hyperparameters if key in group}
        return ParameterGroup(
            settings={**settings, "lr": group["initial_lr"]},
            parameters=[names[parameter] for parameter in group["params"] if parameter.numel()],
        )


def local_parts(module: nn.Module) -> Iterator[Part]:
    """This rank's part of every parameter and stored buffer."""
    for name, tensor in stored_tensors(module):
        start, length = local_span(name, tensor)
        if length:
            yield Part(name, start, flat(tensor))


def local_span(name: str, tensor: Tensor) -> tuple[int, int]:
    """Where this rank's part starts in the flattened full tensor, and how long it is, in elements.

    Raises StageError for a tensor that is sharded otherwise than by rows.
    """
    if not isinstance(tensor, DTensor):
        return 0, tensor.numel()
    rows, first = tensor.shape[0], 0
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if type(placement) is not Shard or placement.dim != 0:
            raise StageError(f"{name} is placed as {placement}, which cannot be saved")
        # torch.chunk's rule, which DTensor follows
        chunk = -(-rows // tensor.device_mesh.size(axis))
        skip = min(chunk * tensor.device_mesh.get_local_rank(axis), rows)
        first, rows = first + skip, min(chunk, rows - skip)
    here = tensor.to_local().shape[0]
    assert here == rows, f"{name}: {here} rows are here, expected {rows}"
    width = tensor.numel() // max(tensor.shape[0], 1)
    return first * width, rows * width


def _loss_scale(scaler: GradScaler) -> LossScale:
    state = scaler.state_dict()
    return LossScale(scale=float(state["scale"]), good_steps=int(state["_growth_tracker"]))


def _set_loss_scale(scaler: GradScaler, saved: LossScale) -> None:
    # The growth settings stay those of the recipe.
    good_steps = saved.good_steps % scaler.get_growth_interval()  # it grows at equality alone
    counters = {"scale": saved.scale, "_growth_tracker": good_steps}
    scaler.load_state_dict({**scaler.state_dict(), **counters})
