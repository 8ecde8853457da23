"""An engine whose whole state is a torch module and a torch optimizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from pipeline.artifacts import OptimizerPlan
from pipeline.engine import WEIGHT, Engine, EngineState, Fragment, LossScale, ParameterGroup
from pipeline.errors import StageError
from stages.wrap.birth import aliases, stored_tensors
from stages.wrap.moments import require_known, set_updates, start_state, updates


class TorchEngine(Engine):
    """Tells its training state parameter by parameter, sharded by rows or whole."""

    optimizer: Optimizer
    scaler: GradScaler | None
    plan: OptimizerPlan

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The model itself, with names as in the source."""

    def state(self) -> EngineState:
        self.settle()
        trained = dict(self._trained())
        return EngineState(
            shapes={name: tuple(tensor.shape) for name, tensor in stored_tensors(self.module)},
            aliases=aliases(self.module),
            frozen=[n for n, p in self.module.named_parameters() if not p.requires_grad],
            groups=[self._group(group) for group in self.optimizer.param_groups],
            updates={name: updates(state) for name, state in trained.items()},
            moments=tuple(self.plan.moments),
            loss_scale=None if self.scaler is None else _loss_scale(self.scaler),
        )

    def fragments(self) -> Iterator[Fragment]:
        self.settle()
        trained = dict(self._trained())
        for name, tensor in stored_tensors(self.module):
            kinds = {WEIGHT: tensor}
            if name in trained:
                kinds |= {moment: trained[name][moment] for moment in self.plan.moments}
            parts = {kind: local_part(name, value) for kind, value in kinds.items()}
            start = parts[WEIGHT][1]
            if parts[WEIGHT][0].numel():
                state = {kind: view for kind, (view, _) in parts.items()}
                yield Fragment(name=name, shape=tuple(tensor.shape), start=start, state=state)

    def restore(self, state: EngineState) -> Iterator[Fragment]:
        self.settle()
        for name, kept in self._trained():
            set_updates(kept, state.updates[name], self.optimizer)
        if self.scaler is not None and state.loss_scale is not None:
            _set_loss_scale(self.scaler, state.loss_scale)
        yield from self.fragments()

    def refresh(self) -> None:
        """Masters are the parameters themselves."""

    def settle(self) -> None:
        """Bring parameters and optimizer into the form in which state is read and written."""
        start_state(self.optimizer, self.plan)

    def _trained(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and optimizer state of every trained parameter."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                state = self.optimizer.state[parameter]
                require_known(state, self.plan.moments, type(self.optimizer).__name__)
                yield name, state

    def _group(self, group: dict[str, Any]) -> ParameterGroup:
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        settings = {key: group[key] for key in self.plan.hyperparameters if key in group}
        return ParameterGroup(
            settings={**settings, "lr": group["initial_lr"]},
            parameters=[names[parameter] for parameter in group["params"]],
        )


def local_part(name: str, tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's part as a flat view, and where it starts in the flattened full tensor.

    Raises StageError for a tensor that is sharded otherwise than by rows.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().view(-1), 0
    local = tensor.to_local().detach()
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
    assert local.shape[0] == rows, f"{name}: {local.shape[0]} rows are here, expected {rows}"
    return local.view(-1), first * (tensor.numel() // max(tensor.shape[0], 1))


def _loss_scale(scaler: GradScaler) -> LossScale:
    state = scaler.state_dict()
    return LossScale(scale=float(state["scale"]), good_steps=int(state["_growth_tracker"]))


def _set_loss_scale(scaler: GradScaler, saved: LossScale) -> None:
    # The growth settings stay those of the recipe.
    counters = {"scale": saved.scale, "_growth_tracker": saved.good_steps}
    scaler.load_state_dict({**scaler.state_dict(), **counters})
