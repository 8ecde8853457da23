"""The state that an optimizer keeps for each parameter: moments, and a count of updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline import EngineState, OptimizerPart, ParameterGroup, StageError
from pipeline.utils import local_part
from stages.wrap.load_weights import aliases, flat, stored_tensors

UPDATES = "step"
"""Key under which torch counts updates."""


def start_state(optimizer: Optimizer, part: OptimizerPart) -> None:
    """Create every parameter's state as the optimizer's first step would, so that it can be saved
    and restored before there is one."""
    for group in optimizer.param_groups:
        # torch's fused and capturable kernels read the count of updates on the device.
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            if optimizer.state[parameter]:
                continue
            if part.packing is None:
                state = {name: torch.zeros_like(parameter.detach()) for name in part.moments}
            else:
                own = flat(parameter)
                state = part.packing.start(own, own.numel())
            count: dict[str, Tensor] = {}
            if part.counts_updates:
                place = parameter.device if on_device else torch.device("cpu")
                count[UPDATES] = torch.zeros((), dtype=torch.float32, device=place)
            optimizer.state[parameter] = count | state


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


def updates(state: Mapping[str, Any], uncounted: int) -> int:
    """Number of a parameter's updates; `uncounted` under a rule that keeps no count."""
    return int(state.get(UPDATES, uncounted))


def set_updates(state: dict[str, Any], count: int) -> None:
    """Set the count of updates, if the rule keeps one."""
    if isinstance(state.get(UPDATES), Tensor):
        state[UPDATES].fill_(count)
    elif UPDATES in state:
        state[UPDATES] = count


def require_known(
    state: Mapping[str, Any], part: OptimizerPart, optimizer: str, parameter: Tensor
) -> None:
    """Raise StageError for state other than the part's moments, each of the shape of this rank's
    part of the `parameter`, such as a factored second moment: it cannot be split by parameter.
    Packed state is the packing's own."""
    if part.packing is not None:
        return
    if _kept(state, part) != set(part.moments):
        raise _not_declared(state, part, optimizer)
    for name in part.moments:
        shape = tuple(local_part(state[name]).shape)
        if shape != parameter.shape:
            raise StageError(
                f"{optimizer} keeps {name!r} of shape {shape} for a parameter of shape "
                f"{tuple(parameter.shape)}; such state cannot be saved"
            )


@contextlib.contextmanager
def declared_state(optimizer: Optimizer, part: OptimizerPart) -> Iterator[None]:
    """Raise StageError if the update in the body looks for something in a parameter's state that
    the part does not declare, so that `start_state` has not made it; or if it has added state that
    the part does not declare, to a parameter's, next to these or to a group: no checkpoint would
    have it, and a resume would go on without. What a rule keeps in attributes of its own is not
    seen.
    """
    groups = [_settings(group) for group in optimizer.param_groups]
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
            if isinstance(state, _Started):
                optimizer.state[of] = dict(state)
    name = type(optimizer).__name__
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        if changed := [key for key, now in _settings(group).items() if before.get(key) != now]:
            raise StageError(
                f"{name} keeps {sorted(changed)} in a group of parameters; such state cannot be "
                "saved",
                hint="keep it in the state of each parameter, and declare it",
            )
    for of, state in optimizer.state.items():
        if not isinstance(of, Tensor):
            raise StageError(
                f"{name} keeps {of!r} next to the state of parameters; such state cannot be saved",
                hint="keep it in the state of each parameter, and declare it",
            )
        if part.packing is None and not _kept(state, part) <= set(part.moments):
            raise _not_declared(state, part, name)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and words of a group, but for its count of updates and its rate, which each step
    sets."""
    return {
        key: value
        for key, value in group.items()
        if isinstance(value, int | float | str) and key not in ("lr", UPDATES)
    }


def require_zeros(part: OptimizerPart, device: torch.device) -> None:
    """Raise StageError for a rule that does not begin with the state that `start_state` makes, by
    two updates of a small matrix: one from that state, and one from none. A rule that fails here
    fails in its first update, which reports it."""
    if part.packing is not None:
        return
    same = True
    # The random numbers of training stay as they are.
    fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with contextlib.suppress(Exception), fork:
        given, own = (_updated(part, device, started=started) for started in (True, False))
        same = all(torch.equal(given[name], own[name]) for name in given.keys() & own.keys())
    if not same:
        raise StageError(
            f"{part.algorithm} does not begin with moments of zeros, and its stage says so",
            hint="describe them by a packing (StateCodec), whose `start` makes them",
        )


def _updated(part: OptimizerPart, device: torch.device, *, started: bool) -> dict[str, Tensor]:
    """A matrix and its moments after an update."""
    values = torch.arange(1.0, 65.0, device=device).view(8, 8)
    parameter = nn.Parameter(values / 64)
    parameter.grad = values.flip(0) / 64
    whole = () if part.elementwise else (_undivided,)
    optimizer = part.build([{"params": [parameter]}], *whole)
    if started:
        start_state(optimizer, part)
    optimizer.step()
    state = optimizer.state[parameter]
    moments = {name: state[name] for name in part.moments if isinstance(state.get(name), Tensor)}
    return {"": parameter.detach(), **moments}


def _undivided(
    parameters: Iterable[nn.Parameter],
    part: Callable[[nn.Parameter], Tensor],
    function: Callable[[Tensor], Tensor],
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The `WholeMatrices` of matrices that nobody divides."""
    return ((parameter, function(part(parameter))) for parameter in parameters)


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
