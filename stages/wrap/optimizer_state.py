"""What optimizers keep for each parameter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.errors import StageError

UPDATES = "step"
"""torch's name of the count of updates."""


def start_state(optimizer: Optimizer, plan: OptimizerPlan) -> None:
    """Give every parameter the state that its first update would give it. Exactly what the
    optimizer would do itself, but before a first step, so that state can be saved and restored."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                count = {UPDATES: _zero(group, parameter)} if plan.counts_updates else {}
                optimizer.state[parameter] = count | _start(parameter.detach(), plan)


def _start(parameter: Tensor, plan: OptimizerPlan) -> dict[str, Tensor]:
    if plan.packing is None:
        return {name: torch.zeros_like(parameter) for name in plan.moments}
    own = flat(parameter)
    return plan.packing.start(own, own.numel())


def flat(tensor: Tensor) -> Tensor:
    """This process's elements as a live, flat view."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().view(-1)


def read_moments(
    state: Mapping[str, Any], plan: OptimizerPlan, start: int, stop: int
) -> dict[str, Tensor]:
    """Elements [start, stop) of each moment, flat: live views, or copies of packed ones, which
    `write_moments` takes back."""
    if plan.packing is None:
        return {name: flat(state[name])[start:stop] for name in plan.moments}
    return {name: plan.packing.unpack(state, name, start, stop) for name in plan.moments}


def write_moments(
    state: Mapping[str, Any], plan: OptimizerPlan, moments: Mapping[str, Tensor]
) -> None:
    """Keep what was written into all elements of `read_moments`' tensors."""
    if plan.packing is not None:
        for name, values in moments.items():
            plan.packing.pack(state, name, values)


def _zero(group: Mapping[str, Any], parameter: nn.Parameter) -> Tensor:
    """torch's fused and capturable kernels read the count on the device."""
    on_device = group.get("fused") or group.get("capturable")
    device = parameter.device if on_device else torch.device("cpu")
    return torch.zeros((), dtype=torch.float32, device=device)


def updates(state: Mapping[str, Any], uncounted: int) -> int:
    """How often a parameter was updated; `uncounted` under a rule that does not count."""
    return int(state.get(UPDATES, uncounted))


def set_updates(
    state: dict[str, Any], count: int, optimizer: Optimizer, group: int | None = None
) -> None:
    """Put the count of updates back; `group` is the number of the optimizer group, for kernels that
    count in it."""
    if isinstance(state.get(UPDATES), Tensor):
        state[UPDATES].fill_(count)
    elif UPDATES in state:
        state[UPDATES] = count
    if group is not None and UPDATES in optimizer.param_groups[group]:
        optimizer.param_groups[group][UPDATES] = count


def require_known(state: Mapping[str, Any], plan: OptimizerPlan, optimizer: str) -> None:
    """Raises StageError for state that belongs to no element of the parameter, such as factors of
    its second moment. What is packed is what the packing has made."""
    tensors = {key for key, value in state.items() if isinstance(value, Tensor) and key != UPDATES}
    if plan.packing is None and tensors != set(plan.moments):
        raise StageError(
            f"{optimizer} keeps {_list(tensors)} for a parameter, its stage declares "
            f"{_list(plan.moments)}; such state cannot be saved"
        )


def _list(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
