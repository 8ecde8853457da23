"""Optimizers of the plan's parts, and the state that they keep for each parameter: moments, and a
count of updates."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline import (
    EngineState,
    NamedParameter,
    OptimizerPart,
    OptimizerPlan,
    ParameterGroup,
    StageError,
)
from pipeline.utils import local_part
from stages.wrap.build import named_parameters
from stages.wrap.shards import flat, stored_tensors
from stages.wrap.whole_matrices import MatrixExchange

UPDATES = "step"
"""Key under which torch counts updates."""


class LivePart(NamedTuple):
    """A part of the plan with the optimizer of its parameters on this rank."""

    number: int
    """Its place in the plan."""
    plan: OptimizerPart
    optimizer: Optimizer
    """A rule may make a new mapping of a parameter's `state` in each update."""


def make_optimizers(
    plan: OptimizerPlan, module: nn.Module, parts: Sequence[nn.Module] = ()
) -> list[LivePart]:
    """The optimizers of the plan's parts. Each group keeps its base rate as `initial_lr`. Where
    this rank has `parts` of the whole `module`: the optimizers that have parameters here, in groups
    of the whole. Raises StageError if nothing is trained."""
    parts = parts or [module]
    here = {one for part in parts for one in part.parameters()}
    found = []
    divided = plan.divide(named_parameters(module, parts))
    for number, (part, own) in enumerate(zip(plan.parts, divided, strict=True)):
        groups = []
        for group in groups_of(part, own) if own else ():
            by_mesh = defaultdict(list)  # torch updates a group's parameters together
            for one in group["params"]:
                if one in here:
                    by_mesh[getattr(one, "device_mesh", None)].append(one)
            groups += [{**group, "params": same} for same in by_mesh.values()]
        if groups:
            require_zeros(part, local_part(groups[0]["params"][0]).device)
            whole = () if part.elementwise else (MatrixExchange(),)
            optimizer = part.build(groups, *whole)
            for group in optimizer.param_groups:
                group["initial_lr"] = group["lr"]
            found.append(LivePart(number, part, optimizer))
    if plan.parts and not found:
        raise StageError(
            "the optimizer has nothing to train: every parameter of the model is frozen",
            hint="look at the model slot and its adapter",
        )
    return found


def groups_of(part: OptimizerPart, own: Sequence[NamedParameter]) -> list[dict[str, Any]]:
    """The part's parameters in its groups. Raises StageError unless each is in one of them."""
    groups = part.groups(own)
    taken = Counter(id(one) for group in groups for one in group["params"])
    for one in own:
        if (times := taken[id(one.parameter)]) != 1:
            rule = part.name or part.algorithm
            raise StageError(f"{rule} has {one.name} in {times} groups, not in one")
    return groups


def start_state(optimizer: Optimizer, part: OptimizerPart) -> None:
    """Create every parameter's state as the optimizer's first step would, so that it can be saved
    and restored before there is one."""
    for group in optimizer.param_groups:
        # torch's fused and capturable kernels read the count of updates on the device.
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            if optimizer.state[parameter]:
                continue
            own, state = flat(parameter), dict[str, Tensor]()
            if part.counts_updates:
                place = parameter.device if on_device else torch.device("cpu")
                state[UPDATES] = torch.zeros((), dtype=torch.float32, device=place)
            if part.packing is None:
                state |= {name: torch.zeros_like(parameter.detach()) for name in part.moments}
            else:
                state |= part.packing.start(own, own.numel())
            optimizer.state[parameter] = state


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


def set_updates(state: dict[str, Any], count: int) -> None:
    """Set the count of updates, if the rule keeps one."""
    if isinstance(state.get(UPDATES), Tensor):
        state[UPDATES].fill_(count)
    elif UPDATES in state:
        state[UPDATES] = count


def require_known(
    state: Mapping[str, Any], part: OptimizerPart, optimizer: str, parameter: Tensor | None = None
) -> None:
    """Raise StageError for state other than the part's moments, each of the shape of this rank's
    part of the `parameter`: a factored second moment cannot be split by parameter. Without a
    `parameter`, moments may be missing, which a first update may still make. Packed state is the
    packing's own."""
    if part.packing is not None:
        return
    counted = {UPDATES} if part.counts_updates else set[str]()
    kept = {key for key, value in state.items() if value is not None} - counted
    if kept - set(part.moments) or (parameter is not None and kept != set(part.moments)):
        raise StageError(
            f"{optimizer} keeps {sorted(kept)} for a parameter, its stage declares "
            f"{sorted(part.moments)}; such state cannot be saved"
        )
    for name in part.moments:
        if parameter is not None and (shape := local_part(state[name]).shape) != parameter.shape:
            raise StageError(
                f"{optimizer} keeps {name!r} of shape {tuple(shape)} for a parameter of shape "
                f"{tuple(parameter.shape)}; such state cannot be saved"
            )


class _MissingState(KeyError):
    """A key that a parameter's state does not have, unlike one that is missing elsewhere."""


class _Started(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        raise _MissingState(key)


@contextlib.contextmanager
def declared_state(optimizer: Optimizer, part: OptimizerPart) -> Iterator[None]:
    """Raise StageError if the update in the body looks for state that the part does not declare, or
    adds such state to a parameter's, next to these or to a group: no checkpoint would have it, and
    a resume would continue without it. What a rule keeps in its own attributes is not seen."""
    name, hint = type(optimizer).__name__, "keep it in the state of each parameter, and declare it"
    groups = [dict(group) for group in optimizer.param_groups]
    started = {of: state for of, state in optimizer.state.items() if type(state) is dict}
    optimizer.state.update((of, _Started(state)) for of, state in started.items())
    try:
        yield
    except _MissingState as error:
        counts = f"counts_updates={part.counts_updates}"
        raise StageError(
            f"{name} looks for {error} in a parameter's state, and its stage declares moments "
            f"{sorted(part.moments)} and {counts}",
            hint="declare every key of its state; `step` is the count of updates",
        ) from error
    finally:
        for of, state in optimizer.state.items():
            if isinstance(state, _Started):
                optimizer.state[of] = dict(state)
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        words = {key: now for key, now in group.items() if isinstance(now, int | float | str)}
        changed = {key for key, now in words.items() if before.get(key) != now}
        if changed := changed - {"lr", UPDATES}:  # the rate is set and updates counted each step
            raise StageError(
                f"{name} keeps {sorted(changed)} in a group of parameters; such state cannot be "
                "saved",
                hint=hint,
            )
    for of, state in optimizer.state.items():
        if not isinstance(of, Tensor):
            raise StageError(
                f"{name} keeps {of!r} next to the state of parameters; such state cannot be saved",
                hint=hint,
            )
        require_known(state, part, name)


def require_zeros(part: OptimizerPart, device: torch.device) -> None:
    """Raise StageError for a rule that does not begin with the state that `start_state` makes: it
    updates a small matrix from that state and from none. A rule that fails here fails in its first
    update, which reports it."""
    if part.packing is not None:
        return
    undivided = [lambda given, of, function: ((one, function(of(one))) for one in given)]
    exchange, found, same = [] if part.elementwise else undivided, list[dict[str, Tensor]](), True
    # The random numbers of training stay as they are.
    fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with contextlib.suppress(Exception), fork:
        for started in (True, False):
            values = torch.arange(1.0, 65.0, device=device).view(8, 8)
            parameter = nn.Parameter(values / 64)
            parameter.grad = values.flip(0) / 64
            optimizer = part.build([{"params": [parameter]}], *exchange)
            if started:
                start_state(optimizer, part)
            optimizer.step()
            kept = {"": parameter.detach(), **optimizer.state[parameter]}
            names = (name for name in ("", *part.moments) if torch.is_tensor(kept.get(name)))
            found.append({name: kept[name] for name in names})
        given, own = found
        both = given.keys() & own.keys()
        same = all(torch.equal(given[name], own[name]) for name in both)
    if not same:
        raise StageError(
            f"{part.algorithm} does not begin with moments of zeros, and its stage says so",
            hint="describe them by a packing (StateCodec), whose `start` makes them",
        )


def group_state(
    part: OptimizerPart, given: Mapping[str, Any], names: Sequence[str]
) -> ParameterGroup:
    """A group of the part in a training state, with the settings that are `given`, its base rate
    among them."""
    settings = {key: given.get(key, own) for key, own in part.hyperparameters.items()}
    return ParameterGroup(
        settings=settings | {"lr": float(settings["lr"])},
        parameters=list(names),
        moments=tuple(part.moments),
    )


def fixed_state(
    module: nn.Module, groups: Sequence[ParameterGroup],
    shape: Callable[[Tensor], tuple[int, ...]] = lambda tensor: tuple(tensor.shape),
) -> EngineState:  # fmt: skip
    """The part of a training state that never changes."""
    first = {parameter: name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return EngineState(
        shapes={name: shape(tensor) for name, tensor in stored_tensors(module)},
        aliases={name: first[one] for name, one in every if first[one] != name},
        frozen=[name for name, one in module.named_parameters() if not one.requires_grad],
        groups=groups,
        updates={},
        loss_scale=None,
    )
