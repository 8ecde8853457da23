"""A state in the terms of torch.distributed.checkpoint: state dicts of a model and an optimizer."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipeline import WEIGHT, CheckpointError, EngineState, ParameterGroup, Progress
from pipeline.checkpoint import Reading, StateSource, appearing
from stages.formats import dcp_compat, stored
from stages.formats.dcp_compat import Chunk, Keys
from stages.formats.stored import MOMENTS, Stored

MODEL, OPTIMIZER, STEP = "model", "optimizer", "step"


class Optimizer(NamedTuple):
    """Entries of an optimizer's state dict by parameter, the settings by parameter or by group."""

    moments: dict[str, dict[str, Stored | Chunk]]
    counts: dict[str, Stored | Chunk]
    settings: dict[str, dict[str, Stored | Chunk]]


def open_dcp(folder: Path, parts: Sequence[Path], reading: Reading) -> StateSource:
    """The state in the folders `parts` of `folder`. Raises CheckpointError."""
    items: dict[Keys, Stored | Chunk] = {}
    for part in parts:
        items |= dcp_compat.read_items(part)
    # Tensors under `model`, or next to the optimizer if there are none.
    tensors = {keys: item for keys, item in items.items() if isinstance(item, Stored)}
    named = {keys[1:]: one for keys, one in tensors.items() if keys[0] == MODEL and len(keys) > 1}
    named = named or {keys: one for keys, one in tensors.items() if len(keys) == 1}
    found = {f"{WEIGHT}/{'.'.join(keys)}": one for keys, one in named.items()}
    weights, optimizer = [".".join(keys) for keys in named], _optimizer(items)
    if not weights:
        raise CheckpointError(f"{folder}: holds no weights")
    moments = {} if reading.weights_only else _moments(folder, optimizer, weights)
    aliases = dict(_aliases(found, [name for name in optimizer.moments if name in weights]))
    for alias in aliases:
        del found[f"{WEIGHT}/{alias}"]
    updates = {
        name: int(dcp_compat.load_value(optimizer.counts[name], f"{name}.{STEP}"))
        for name in optimizer.moments
        if name in optimizer.counts or not reading.weights_only
    }
    step = max(updates.values(), default=0)
    # Ranks are in the names of their files.
    files = (file.name for part in parts for file in part.iterdir())
    writers = (re.fullmatch(r"__(\d+)_\d+\.distcp", name) for name in files)
    return stored.MappedSource(
        where=str(folder),
        step=step,
        world_size=max((int(match[1]) for match in writers if match), default=0) + 1,
        writer={"format": "dcp"},
        progress=vars(Progress(step=step, samples=reading.samples)),
        state=EngineState(
            aliases=aliases,
            frozen=[n for n in weights if n not in optimizer.moments and n not in aliases],
            groups=[] if reading.weights_only else list(_groups(optimizer)),
            updates=updates,
            loss_scale=None,
        ),
        stored=found | moments,
    )


def _optimizer(items: Mapping[Keys, Stored | Chunk]) -> Optimizer:
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


def _moments(folder: Path, optimizer: Optimizer, weights: Collection[str]) -> dict[str, Stored]:
    """The moments by key. Raises CheckpointError unless they are Adam's, of weights."""
    if not optimizer.moments:
        raise CheckpointError(
            f"{folder}: holds no optimizer state", hint="--weights-only takes only the weights"
        )
    found = {}
    for name, kinds in optimizer.moments.items():
        stored.require_moments(kinds, str(folder), name)
        if name not in weights:
            raise CheckpointError(f"{folder}: holds optimizer state of {name}, but no weight")
        for kind, item in kinds.items():
            if isinstance(item, Chunk):
                raise CheckpointError(f"{item.file}: the state of {name} is not a tensor")
            found[f"{kind}/{name}"] = item
    return found


def _aliases(found: Mapping[str, Stored], trained: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Untrained matrices that equal a trained one: other names of a tied weight."""

    def equal(one: Stored, other: Stored) -> bool:
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        numel = math.prod(one.shape)
        both = zip(one.read(0, numel), other.read(0, numel), strict=True)
        return all(a == b for (_, a), (_, b) in both)

    for key, tensor in found.items():
        name = key.removeprefix(f"{WEIGHT}/")
        if name not in trained and len(tensor.shape) > 1:
            same = (one for one in trained if equal(tensor, found[f"{WEIGHT}/{one}"]))
            yield from ((name, other) for other in itertools.islice(same, 1))


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
    """Entries other than the moments, named as `get_optimizer_state_dict` flattens them. Raises
    CheckpointError for other settings than AdamW's."""
    for name, count in source.state.updates.items():
        yield f"state.{name}.{STEP}", torch.tensor(float(count))
    for group in source.state.groups:
        own = group.settings
        if set(own) != set(stored.SETTINGS):
            raise CheckpointError(
                f"{source.where}: the optimizer has the settings {', '.join(sorted(own))}; only "
                f"AdamW's {', '.join(stored.SETTINGS)} can be converted"
            )
        # Loading needs every setting of torch's AdamW.
        known = {**own, "betas": tuple(own["betas"])}
        (whole,) = torch.optim.AdamW([torch.zeros(1)], **known).param_groups
        for key, value in {**whole, "initial_lr": own["lr"]}.items():
            if key != "params":
                yield from ((f"param_groups.{name}.{key}", value) for name in group.parameters)
