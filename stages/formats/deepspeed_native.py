"""A checkpoint of `DeepSpeedEngine.save_checkpoint` under ZeRO-1, 2 or 3, read as a state.

It is read without DeepSpeed and without running anything. Under ZeRO, the master weights of several
parameters make one flat tensor per rank, and so do their moments, in the same places.
"""

from __future__ import annotations

import base64
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline import WEIGHT, CheckpointError, EngineState, LossScale, ParameterGroup, Progress
from pipeline.checkpoint import Reading, StateSource, random_key
from stages.formats import stored
from stages.formats.stored import (
    MOMENTS,
    PROGRESS,
    MappedSource,
    Shape,
    Stored,
    flattened,
    fresh_progress,
    joined,
    read_json,
    require_file_name,
    require_moments,
    settings,
    understood,
    whole,
)

Saved = Mapping[str, Any]
STEP = "step"
_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_(?:model|optim)_states\.pt"
)


class Scaler:
    """Stands in for DeepSpeed's loss scalers: has their saved attributes, and does nothing."""

    cur_scale: float
    dynamic: bool
    cur_iter: int
    last_overflow_iter: int
    scale_window: int


class Fragment:
    """Stands in for elements [start, start + numel) of a rank's flat tensor."""

    numel: int
    start: int


class Stage(int):
    """Stands in for the number of the ZeRO stage."""


ADMITTED = [
    (Scaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Scaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def load(file: Path, *, verify: bool = True) -> Any:
    """Content of one of DeepSpeed's files. Raises CheckpointError."""
    return stored.load(file, ADMITTED, verify=verify)


class Place(NamedTuple):
    """Elements [start, stop) of the flat tensor of rank `rank`."""

    rank: int
    start: int
    stop: int


class FlatGroup(NamedTuple):
    """Parameters whose tensors lie in flat tensors, one per rank and kind."""

    number: int
    """Number of the optimizer group."""
    shapes: Mapping[str, Shape]
    places: Mapping[str, Sequence[Place]]
    """Places of each parameter, in order."""
    flats: Mapping[str, Sequence[Tensor]]
    """Flat tensors of all ranks, by kind."""
    counts: set[int]
    """Numbers of updates, as the ranks saved them."""
    settings: Saved


def open_native(folder: Path, state: Path, reading: Reading) -> StateSource:
    """The state in the sub-folder `state` of `folder`. Raises CheckpointError."""
    models, optimizers = (
        [load(file, verify=reading.verify) for file in _files(state, kind)]
        for kind in ("model", "optim")
    )
    ranks = [saved["optimizer_state_dict"] for saved in optimizers]
    sharded = "fp32_flat_groups" in ranks[0]
    _require_complete(state, models, ranks, sharded=sharded)
    groups = list(_flat_groups(state, models, ranks, sharded=sharded))
    model, moments = models[0], () if reading.weights_only else MOMENTS
    for group in groups if moments else ():
        _require_optimizer(group, state)
    frozen = dict(_frozen_shards(models) if sharded else _frozen(model, groups))
    buffers = {name: whole(model["module"][name]) for name in model["buffer_names"]}
    step = int(model["global_steps"])
    return MappedSource(
        where=str(folder),
        step=step,
        world_size=len(ranks),
        writer={"format": "deepspeed", "packages": {"deepspeed": model.get("ds_version")}},
        progress=_own_progress(folder)
        or fresh_progress(step, reading.samples, int(model.get("skipped_steps") or 0)),
        state=EngineState(
            aliases=dict(model["shared_params"]),
            frozen=list(frozen),
            groups=list(_optimizer_groups(groups)),
            updates={n: max(g.counts) for g in groups for n in g.shapes} if moments else {},
            moments=list(moments),
            loss_scale=loss_scale(ranks[0]),
        ),
        stored={f"{WEIGHT}/{name}": value for name, value in (frozen | buffers).items()}
        | dict(_trained(groups, (WEIGHT, *moments)))
        | dict(_own_random(folder)),
    )


def _files(folder: Path, kind: str) -> list[Path]:
    """Files of all ranks, in rank order. Raises CheckpointError for other parallelism than ZeRO."""
    found = []
    for file in folder.glob(f"*_{kind}_states.pt"):
        match = _FILE.fullmatch(file.name)
        if match is None or int(match["mp"]):
            raise CheckpointError(
                f"{file}: is of tensor, pipeline or expert parallelism, which is not converted"
            )
        found.append((int(match["dp"] or 0), file))
    ranks = [rank for rank, _ in sorted(found)]
    if not ranks or ranks != list(range(len(ranks))):
        raise CheckpointError(
            f"{folder}: has a *_{kind}_states.pt for the ranks {ranks}: incomplete, or not saved "
            "under ZeRO-1, 2 or 3"
        )
    return [file for _, file in sorted(found)]


def _require_complete(
    folder: Path, models: Sequence[Saved], ranks: Sequence[Saved], *, sharded: bool
) -> None:
    expected = models[0]["dp_world_size"]
    if not sharded and "single_partition_of_fp32_groups" not in ranks[0]:
        raise CheckpointError(f"{folder}: holds no master weights of ZeRO")
    for name, found in {"optimizer": ranks, **({"model": models} if sharded else {})}.items():
        if len(found) != expected:
            raise CheckpointError(
                f"{folder}: has the {name} state of {len(found)} ranks, {expected} saved"
            )
    count = ranks[0].get("partition_count", expected)
    if {*(count if isinstance(count, list) else [count])} != {expected}:
        raise CheckpointError(f"{folder}: sharded within groups of ranks, which is not converted")
    if ranks[0].get("ds_zero_partition_groups") or models[0].get("num_experts"):
        raise CheckpointError(f"{folder}: is of expert parallelism, which is not converted")


def _flat_groups(
    folder: Path, models: Sequence[Saved], ranks: Sequence[Saved], *, sharded: bool
) -> Iterator[FlatGroup]:
    """One flat group per optimizer group, or under stage 3 one or more."""
    masters = "fp32_flat_groups" if sharded else "single_partition_of_fp32_groups"
    bases = [rank["optimizer_state_dict" if sharded else "base_optimizer_state"] for rank in ranks]
    groups = bases[0]["param_groups"]
    owners = {index: number for number, group in enumerate(groups) for index in group["params"]}
    for index, shapes in enumerate(models[0]["param_shapes"]):
        group = groups[owners[index]]
        states = []
        for rank, (saved, base) in enumerate(zip(ranks, bases, strict=True)):
            state = {STEP: group.get(STEP, -1), **base["state"].get(index, {})}
            state[WEIGHT] = saved[masters][index]
            states.append({kind: _in_memory(folder, rank, v) for kind, v in state.items()})
        counts = {int(state.pop(STEP)) for state in states}
        flats = {
            kind: [flattened(state[kind]) for state in states]
            for kind in states[0]
            if all(isinstance(state.get(kind), Tensor) for state in states)
        }
        if sharded:
            places = _cut_each(shapes, len(ranks))
        else:
            places = _cut_as_one(shapes, flats[WEIGHT], index, ranks)
            if not _reorders(models[0].get("ds_config")):
                mappings = [rank["param_slice_mappings"][index] for rank in ranks]
                _require_same_places(folder, places, mappings)
        yield FlatGroup(owners[index], shapes, places, flats, counts, group)


def _cut_each(shapes: Mapping[str, Shape], ranks: int) -> dict[str, list[Place]]:
    """Stage 3: each parameter is cut into a part per rank, of which the last are padded; the flat
    tensor of a rank is its parts of all parameters."""
    found = {}
    offset = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // ranks)
        sizes = [min(part, numel - rank * part) for rank in range(ranks)]
        found[name] = [
            Place(rank, offset, offset + size) for rank, size in enumerate(sizes) if size > 0
        ]
        offset += part
    return found


def _cut_as_one(
    shapes: Mapping[str, Shape], flats: Sequence[Tensor], index: int, ranks: Sequence[Saved]
) -> dict[str, list[Place]]:
    """Stages 1 and 2: the parameters of a group, with padding behind each, make one vector, of
    which each rank has a part."""
    paddings = ranks[0].get("param_alignment_paddings")
    padded = paddings[index] if paddings else [0] * len(shapes)
    found: dict[str, list[Place]] = {}
    start = 0
    for name, padding in zip(shapes, padded, strict=True):
        stop = start + math.prod(shapes[name])
        begins = itertools.accumulate(map(len, flats), initial=0)
        parts = [
            Place(rank, max(start - begin, 0), min(stop - begin, len(flat)))
            for rank, (begin, flat) in enumerate(zip(begins, flats, strict=False))
        ]
        found[name] = [part for part in parts if part.start < part.stop]
        start = stop + padding
    return found


def _reorders(config: Any) -> bool:
    """Whether parameters were dealt out in turn. DeepSpeed 0.19 then saves fragments as if they
    were not (`param_slice_mappings`), while the order of the shapes is right."""
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return bool(zero.get("round_robin_gradients")) if isinstance(zero, Mapping) else False


def _require_same_places(
    folder: Path, places: Mapping[str, list[Place]], mappings: Sequence[Mapping[str, Fragment]]
) -> None:
    """Compare the places with each rank's fragments, the other record of them in the files. Raises
    CheckpointError."""
    for name in {*places}.union(*mappings):
        fragments = [
            Place(rank, mapping[name].start, mapping[name].start + mapping[name].numel)
            for rank, mapping in enumerate(mappings)
            if name in mapping
        ]
        if fragments != places.get(name):
            raise CheckpointError(
                f"{folder}: the files disagree on where {name} lies in the flat tensors; "
                "written by a version of DeepSpeed that is not known here"
            )


def _in_memory(folder: Path, rank: int, value: Any) -> Any:
    """The value, or if it is a tensor that was on disk, the checkpoint's copy of it, mapped."""
    if not isinstance(value, Tensor) or value.numel() or not hasattr(value, "ds_id"):
        return value
    name = require_file_name(f"{value.ds_id}.tensor.swp", str(folder))
    file = folder / "offloaded_tensors" / f"rank{rank:02d}" / name
    if not file.is_file():
        raise CheckpointError(f"{file}: missing; it holds a part of the training state")
    size = file.stat().st_size // value.element_size()
    return torch.from_file(str(file), shared=False, size=size, dtype=value.dtype)


def _require_optimizer(group: FlatGroup, folder: Path) -> None:
    kinds = group.flats.keys() - {WEIGHT}
    require_moments(kinds, str(folder), next(iter(group.shapes), "a parameter"))
    if len(group.counts) != 1 or -1 in group.counts:
        raise CheckpointError(f"{folder}: ranks differ in the number of updates, or have none")


def _optimizer_groups(groups: Sequence[FlatGroup]) -> Iterator[ParameterGroup]:
    for _, parts in itertools.groupby(groups, key=lambda group: group.number):
        own = list(parts)
        names = [name for group in own for name in group.shapes]
        yield ParameterGroup(settings=settings(own[0].settings), parameters=names)


def _trained(groups: Sequence[FlatGroup], kinds: Sequence[str]) -> Iterator[tuple[str, Stored]]:
    for group, kind in itertools.product(groups, kinds):
        for name, places in group.places.items():
            parts = [group.flats[kind][rank][start:stop] for rank, start, stop in places]
            yield f"{kind}/{name}", joined(group.shapes[name], parts)


def _frozen(model: Saved, groups: Sequence[FlatGroup]) -> Iterator[tuple[str, Stored]]:
    """Stages 1 and 2: parameters without a master, which every rank holds whole."""
    known = {*model["buffer_names"], *model["shared_params"]}.union(*(g.shapes for g in groups))
    yield from ((name, whole(t)) for name, t in model["module"].items() if name not in known)


def _frozen_shards(models: Sequence[Saved]) -> Iterator[tuple[str, Stored]]:
    """Stage 3: parameters without a master, of which each rank holds a part."""
    for name, shape in (models[0]["frozen_param_shapes"] or {}).items():
        places = _cut_each({name: shape}, len(models))[name]
        parts = [models[rank]["frozen_param_fragments"][name] for rank in range(len(models))]
        yield name, joined(shape, [flattened(parts[rank])[:stop] for rank, _, stop in places])


def loss_scale(saved: Saved) -> LossScale | None:
    """The state of dynamic loss scaling; None without it."""
    scaler = saved.get("loss_scaler")
    if not isinstance(scaler, Scaler) or not scaler.dynamic:
        return None
    good = scaler.cur_iter - scaler.last_overflow_iter - 1
    return LossScale(scale=float(scaler.cur_scale), good_steps=good % scaler.scale_window)


def _own_progress(folder: Path) -> dict[str, Any] | None:
    """The progress of a pipetrain run; None for another tool's checkpoint."""
    file = folder / PROGRESS
    if not file.is_file():
        return None
    with understood(file, "pipe"):
        return vars(Progress.from_record(read_json(file)["progress"]))


def _own_random(folder: Path) -> Iterator[tuple[str, Stored]]:
    """States of the generators of every rank of a pipetrain run, by key."""
    for file in folder.glob("random-*.json"):
        rank = int(file.stem.removeprefix("random-"))
        for name, text in read_json(file).items():
            data = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            yield random_key(rank, name), whole(data)
