"""The state that an optimizer keeps for each parameter: moments, and a count of updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline import EngineState, OptimizerPart, ParameterGroup, StageError
from stages.wrap.load_weights import aliases, flat, stored_tensors

UPDATES = "step"
"""Key under which torch counts updates."""


def start_state(optimizer: Optimizer, part: OptimizerPart) -> None:
    """Create every parameter's state as the optimizer's first step would, so that it can be saved
    and restored before there is one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                count = {UPDATES: _zero(group, parameter)} if part.counts_updates else {}
                optimizer.state[parameter] = count | _start(parameter.detach(), part)


def _start(parameter: Tensor, part: OptimizerPart) -> dict[str, Tensor]:
    if part.packing is None:
        return {name: torch.zeros_like(parameter) for name in part.moments}
    own = flat(parameter)
    return part.packing.start(own, own.numel())


def read_moments(
    state: Mapping[str, Any], part: OptimizerPart, start: int, stop: int
) -> dict[str, Tensor]:
    """Elements [start, stop) of each moment, flat: live views, or unpacked copies, which
    `write_moments` packs again."""
    if part.packing is None:
        return {name: flat(state[name])[start:stop] for name in part.moments}
    return {name: part.packing.unpack(state, name, start, stop) for name in part.moments}


def write_moments(
    state: Mapping[str, Any], part: OptimizerPart, moments: Mapping[str, Tensor]
) -> None:
    """Pack what was written into `read_moments`' tensors of all elements; views need nothing."""
    if part.packing is not None:
        for name, values in moments.items():
            part.packing.pack(state, name, values)


def _zero(group: Mapping[str, Any], parameter: nn.Parameter) -> Tensor:
    """A count of 0, on the device for torch's fused and capturable kernels, which read it there."""
    on_device = group.get("fused") or group.get("capturable")
    device = parameter.device if on_device else torch.device("cpu")
    return torch.zeros((), dtype=torch.float32, device=device)


def updates(state: Mapping[str, Any], uncounted: int) -> int:
    """Number of a parameter's updates; `uncounted` under a rule that keeps no count."""
    return int(state.get(UPDATES, uncounted))


def set_updates(state: dict[str, Any], count: int) -> None:
    """Set the count of updates, if the rule keeps one."""
    if isinstance(state.get(UPDATES), Tensor):
        state[UPDATES].fill_(count)
    elif UPDATES in state:
        state[UPDATES] = count


def require_known(state: Mapping[str, Any], part: OptimizerPart, optimizer: str) -> None:
    """Raise StageError for state other than the part's moments, such as a factored second moment:
    it cannot be split by parameter. Packed state is the packing's own."""
    if part.packing is None and _kept(state, part) != set(part.moments):
        raise _not_declared(state, part, optimizer)


@contextlib.contextmanager
def declared_state(optimizer: Optimizer, part: OptimizerPart) -> Iterator[None]:
    """Raise StageError if the update in the body looks for something in a parameter's state that
    the part does not declare, so that `start_state` has not made it; or if it has added state that
    the part does not declare: no checkpoint would have it, and a resume would go on without.
    """
    started = {of: state for of, state in optimizer.state.items() if type(state) is dict}
    optimizer.state.update((of, _Started(state)) for of, state in started.items())
    try:
        yield
    except _MissingState as error:
        counts = f"counts_updates={part.counts_updates}"
        raise StageError(
            f"{type(optimizer).__name__} looks for {error} in a parameter's state, and its stage "
            f"declares moments {sorted(part.moments)} and {counts}",
            hint="declare every key of its state; `step` is the count of updates",
        ) from error
    finally:
        for of, state in optimizer.state.items():
            if isinstance(state, _Started):  # into the same mapping, which others may hold
                started[of].clear()
                started[of].update(state)
                optimizer.state[of] = started[of]
    for state in optimizer.state.values() if part.packing is None else ():
        if not _kept(state, part) <= set(part.moments):
            raise _not_declared(state, part, type(optimizer).__name__)


class _MissingState(KeyError):
    """A key that a parameter's state does not have, unlike one that is missing elsewhere."""


class _Started(dict[str, Any]):
    """A parameter's state."""

    def __missing__(self, key: str) -> Any:
        raise _MissingState(key)


def _kept(state: Mapping[str, Any], part: OptimizerPart) -> set[str]:
    """Keys of state other than the declared count of updates."""
    counted = {UPDATES} if part.counts_updates else set[str]()
    return {key for key, value in state.items() if value is not None} - counted


def _not_declared(state: Mapping[str, Any], part: OptimizerPart, optimizer: str) -> StageError:
    return StageError(
        f"{optimizer} keeps {sorted(_kept(state, part))} for a parameter, its stage declares "
        f"{sorted(part.moments)}; such state cannot be saved"
    )


def group_state(
    part: OptimizerPart, given: Mapping[str, Any], names: Sequence[str]
) -> ParameterGroup:
    """A group of the part as a training state has it, with the settings that are `given`, its base
    rate among them."""
    settings = {**part.hyperparameters, **given}
    return ParameterGroup(
        settings={key: settings[key] for key in part.hyperparameters}
        | {"lr": float(settings["lr"])},
        parameters=list(names),
        moments=tuple(part.moments),
    )


def fixed_state(
    module: nn.Module,
    groups: Sequence[ParameterGroup],
    shape: Callable[[Tensor], tuple[int, ...]],
) -> EngineState:
    """The part of a training state that never changes."""
    return EngineState(
        shapes={name: shape(tensor) for name, tensor in stored_tensors(module)},
        aliases=aliases(module),
        frozen=[name for name, p in module.named_parameters() if not p.requires_grad],
        groups=groups,
        updates={},
        loss_scale=None,
    )
