"""A state in the terms of torch.distributed.checkpoint: state dicts of a model and an optimizer."""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline import WEIGHT, CheckpointError, EngineState, ParameterGroup, Progress
from pipeline.checkpoint import Reading, StateSource, appearing
from stages.formats import dcp_compat, stored
from stages.formats.dcp_compat import Item, Keys
from stages.formats.stored import MOMENTS, Stored

MODEL, OPTIMIZER, STEP = "model", "optimizer", "step"
MAPPED = 1024
"""Chunks that stay mapped, as each is read in many parts."""


class Optimizer(NamedTuple):
    """Entries of an optimizer's state dict by parameter, the settings by parameter or by group."""

    moments: dict[str, dict[str, Item]]
    counts: dict[str, Item]
    settings: dict[str, dict[str, Item]]


def open_dcp(folder: Path, parts: Sequence[Path], reading: Reading) -> StateSource:
    """The state in the folders `parts` of `folder`. Raises CheckpointError."""
    items: dict[Keys, Item] = {}
    for part in parts:
        items |= dcp_compat.read_items(part)
    weights, optimizer = _weights(items), _optimizer(items)
    _require_state(folder, weights, optimizer, reading)
    load = functools.lru_cache(MAPPED)(dcp_compat.map_chunk)
    found = {f"{WEIGHT}/{name}": _stored(item, name, load) for name, item in weights.items()}
    aliases = dict(_aliases(found, [name for name in optimizer.moments if name in weights]))
    for alias in aliases:
        del found[f"{WEIGHT}/{alias}"]
    updates = {
        name: int(dcp_compat.load_value(optimizer.counts[name], f"{name}.{STEP}"))
        for name in optimizer.moments
        if name in optimizer.counts or not reading.weights_only
    }
    if not reading.weights_only:
        for name, kinds in optimizer.moments.items():
            found |= {f"{k}/{name}": _stored(item, name, load) for k, item in kinds.items()}
    step = max(updates.values(), default=0)
    trained = optimizer.moments.keys() | aliases.keys()
    return stored.MappedSource(
        where=str(folder),
        step=step,
        world_size=_world_size(items.values()),
        writer={"format": "dcp"},
        progress=vars(Progress(step=step, samples=reading.samples)),
        state=EngineState(
            aliases=aliases,
            frozen=[name for name in weights if name not in trained],
            groups=[] if reading.weights_only else list(_groups(optimizer)),
            updates=updates,
            loss_scale=None,
        ),
        stored=found,
    )


def _weights(items: Mapping[Keys, Item]) -> dict[str, Item]:
    """Tensors under `model`, or next to the optimizer if there are none."""
    tensors = {keys: item for keys, item in items.items() if item.dtype is not None}
    beside = {keys[0]: item for keys, item in tensors.items() if len(keys) == 1}
    named = {keys: item for keys, item in tensors.items() if keys[0] == MODEL and len(keys) > 1}
    return {".".join(keys[1:]): item for keys, item in named.items()} or beside


def _optimizer(items: Mapping[Keys, Item]) -> Optimizer:
    """Items whose keys, however nested, are `optimizer.state.NAME.KIND`, and
    `optimizer.param_groups.NAME.SETTING` or `optimizer.param_groups.NUMBER.SETTING`."""
    found = Optimizer(defaultdict(dict), {}, defaultdict(dict))
    for keys, item in items.items():
        match = re.fullmatch(r"optimizer\.(state|param_groups)\.(.*)\.(\w+)", ".".join(keys), re.S)
        if keys[0] != OPTIMIZER or match is None:
            continue
        section, name, kind = match.groups()
        if section == "param_groups":
            found.settings[name][kind] = item
        elif kind == STEP:
            found.counts[name] = item
        else:
            found.moments[name][kind] = item
    return found


def _require_state(
    folder: Path, weights: Mapping[str, Item], optimizer: Optimizer, reading: Reading
) -> None:
    if not weights:
        raise CheckpointError(f"{folder}: holds no weights")
    if reading.weights_only:
        return
    if not optimizer.moments:
        raise CheckpointError(
            f"{folder}: holds no optimizer state", hint="--weights-only takes only the weights"
        )
    for name, kinds in optimizer.moments.items():
        stored.require_moments(kinds, str(folder), name)
        if name not in weights:
            raise CheckpointError(f"{folder}: holds optimizer state of {name}, but no weight")


def _stored(item: Item, name: str, load: Callable[..., Tensor]) -> Stored:
    kind = item.dtype
    if kind is None:
        raise CheckpointError(f"{item.chunks[0].file}: the state of {name} is not a tensor")
    return Stored(
        shape=item.shape,
        dtype=kind,
        grid=item.shape or (1,),
        boxes=item.boxes,
        load=lambda number: load(item.chunks[number], item.boxes[number], kind.itemsize, name),
    )


def _aliases(found: Mapping[str, Stored], trained: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Untrained matrices that equal a trained one: other names of a tied weight."""
    for key, tensor in found.items():
        name = key.removeprefix(f"{WEIGHT}/")
        if name not in trained and len(tensor.shape) > 1:
            for other in trained:
                if _equal(tensor, found[f"{WEIGHT}/{other}"]):
                    yield name, other
                    break


def _equal(one: Stored, other: Stored) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    numel = math.prod(one.shape)
    both = zip(one.read(0, numel), other.read(0, numel), strict=True)
    return all(a == b for (_, a), (_, b) in both)


def _world_size(items: Iterable[Item]) -> int:
    """Number of ranks that wrote, by the names of their files."""
    names = (chunk.file.name for item in items for chunk in item.chunks)
    matches = (re.fullmatch(r"__(\d+)_\d+\.distcp", name) for name in names)
    return max((int(match[1]) for match in matches if match), default=0) + 1


def _groups(optimizer: Optimizer) -> Iterator[ParameterGroup]:
    """The numbered groups, or else parameters of equal hyperparameters as a group."""
    numbers = sorted(filter(str.isdecimal, optimizer.settings), key=int)
    for number in numbers:
        values = _values(optimizer, number, "params")
        yield stored.group(values, values["params"])
    found: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name in () if numbers else optimizer.moments:
        own = _values(optimizer, name)
        found.setdefault(str(stored.settings(own)), (own, []))[1].append(name)
    yield from (stored.group(own, names) for own, names in found.values())


def _values(optimizer: Optimizer, name: str, *more: str) -> dict[str, Any]:
    wanted = (*stored.SETTINGS, "initial_lr", *more)
    items = optimizer.settings.get(name, {})
    return {
        key: dcp_compat.load_value(items[key], f"{name}.{key}") for key in wanted if key in items
    }


def write_dcp(source: StateSource, folder: Path) -> Sequence[str]:
    """Write `folder`; returns notes for its users. Raises CheckpointError unless it is of AdamW."""
    state = source.state
    if state.kinds():
        stored.require_adam(source, "only weights and Adam's moments can be written")
    own = {name: entry.key for name, entry in stored.weights_of(source).items()}
    tied = {alias: own[name] for alias, name in state.aliases.items()}
    moments = {
        f"state.{name}.{kind}": f"{kind}/{name}" for name in state.updates for kind in MOMENTS
    }
    keys = {MODEL: own | tied, **({OPTIMIZER: moments} if state.kinds() else {})}
    values = {OPTIMIZER: dict(_optimizer_values(source))} if state.kinds() else {}
    with appearing(folder) as partial:
        dcp_compat.write_state_dict(source, keys, values, partial)
    notes = [
        "load it with torch.distributed.checkpoint.load into what get_model_state_dict and "
        "get_optimizer_state_dict(options=StateDictOptions(flatten_optimizer_state_dict=True)) "
        "return, as {'model': ..., 'optimizer': ...}"
    ]
    if state.averages:
        kinds = ", ".join(state.averages)
        notes.append(f"left out, as the format lacks it: {kinds} of the weights")
    return notes


def _optimizer_values(source: StateSource) -> Iterator[tuple[str, Any]]:
    """Entries other than the moments, named as `get_optimizer_state_dict` flattens them."""
    for name, count in source.state.updates.items():
        yield f"state.{name}.{STEP}", torch.tensor(float(count))
    for group in source.state.groups:
        for key, value in _all_settings(group.settings, source.where).items():
            yield from ((f"param_groups.{name}.{key}", value) for name in group.parameters)


def _all_settings(own: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A group of torch's AdamW; loading needs every setting."""
    if set(own) != set(stored.SETTINGS):
        raise CheckpointError(
            f"{where}: the optimizer has the settings {', '.join(sorted(own))}; only AdamW's "
            f"{', '.join(stored.SETTINGS)} can be converted"
        )
    known = {**own, "betas": tuple(own["betas"])}
    (group,) = torch.optim.AdamW([torch.zeros(1)], **known).param_groups
    return {key: value for key, value in group.items() if key != "params"} | {
        "initial_lr": own["lr"]
    }
