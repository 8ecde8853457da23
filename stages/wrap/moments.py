"""What optimizers keep for each parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.errors import StageError

UPDATES = "step"
"""torch's name of the count of updates."""


def start_state(optimizer: Optimizer, moments: Iterable[str]) -> None:
    """Give every parameter the state that its first update would give it: zeros. Exactly what the
    optimizer would do itself, but before a first step, so that state can be saved and restored."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    UPDATES: _zero(group, parameter),
                    **{moment: torch.zeros_like(parameter.detach()) for moment in moments},
                }


def _zero(group: Mapping[str, Any], parameter: nn.Parameter) -> Tensor:
    """torch's fused and capturable kernels read the count on the device."""
    on_device = group.get("fused") or group.get("capturable")
    device = parameter.device if on_device else torch.device("cpu")
    return torch.zeros((), dtype=torch.float32, device=device)


def updates(state: Mapping[str, Any]) -> int:
    """How often a parameter was updated."""
    return int(state[UPDATES])


def set_updates(
    state: dict[str, Any], count: int, optimizer: Optimizer, group: int | None = None
) -> None:
    """Put the count of updates back; `group` is the optimizer group, for kernels that count in it."""
    if isinstance(state[UPDATES], Tensor):
        state[UPDATES].fill_(count)
    else:
        state[UPDATES] = count
    if group is not None and UPDATES in optimizer.param_groups[group]:
        optimizer.param_groups[group][UPDATES] = count


def require_known(state: Mapping[str, Any], moments: Collection[str], optimizer: str) -> None:
    """Raises StageError for state that belongs to no element of the parameter, such as blocks of
    quantised moments."""
    tensors = {key for key, value in state.items() if isinstance(value, Tensor) and key != UPDATES}
    if tensors != set(moments):
        raise StageError(
            f"{optimizer} keeps {', '.join(sorted(tensors))}, expected {', '.join(moments)}; "
            "its state cannot be saved"
        )
