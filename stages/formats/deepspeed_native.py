"""A checkpoint of `DeepSpeedEngine.save_checkpoint` under ZeRO-1, 2 or 3, read as a state."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.checkpoint.formats import Reading, StateSource
from pipeline.contracts.engine import WEIGHT, EngineState, LossScale, ParameterGroup
from pipeline.errors import CheckpointError
from stages.formats.deepspeed_files import (
    Scaler,
    load,
    model_files,
    optimizer_files,
    own_progress,
    own_random,
)
from stages.formats.deepspeed_layout import (
    Placed,
    reorders,
    replicated,
    require_same_account,
    sharded,
)
from stages.formats.mapped import (
    MappedSource,
    Range,
    Stored,
    fresh_progress,
    require_file_name,
    require_moments,
    settings,
    whole,
)

Saved = Mapping[str, Any]
STEP = "step"


class FlatGroup(NamedTuple):
    """Parameters whose masters lie in one flat tensor per rank, with its optimizer state."""

    group: int
    placed: Mapping[str, Placed]
    masters: Sequence[Tensor]
    states: Sequence[Saved]
    settings: Saved


def open_native(folder: Path, state: Path, reading: Reading) -> StateSource:
    """The state in the sub-folder `state` of `folder`. Raises CheckpointError."""
    models = [load(file, verify=reading.verify) for file in model_files(state)]
    ranks = [_of_zero(file, verify=reading.verify) for file in optimizer_files(state)]
    _require_complete(state, models, ranks)
    flats = list(_sharded_flats(state, models, ranks) if _is_sharded(ranks) else
                 _replicated_flats(state, models, ranks))  # fmt: skip
    step = int(models[0]["global_steps"])
    progress = own_progress(folder) or fresh_progress(
        step, reading.samples, int(models[0].get("skipped_steps") or 0)
    )
    moments: tuple[str, ...] = () if reading.weights_only else _moments(flats, state)
    untrained = dict(
        _sharded_frozen(models) if _is_sharded(ranks) else _whole_frozen(models, flats)
    )
    buffers = {name: whole(models[0]["module"][name]) for name in models[0]["buffer_names"]}
    stored = {f"{WEIGHT}/{name}": value for name, value in (untrained | buffers).items()}
    return MappedSource(
        where=str(folder),
        step=step,
        world_size=len(ranks),
        writer={"format": "deepspeed", "packages": {"deepspeed": models[0].get("ds_version")}},
        progress=progress,
        state=EngineState(
            aliases=dict(models[0]["shared_params"]),
            frozen=list(untrained),
            groups=_groups(flats),
            updates={} if reading.weights_only else dict(_updates(flats, state)),
            moments=list(moments),
            loss_scale=loss_scale(ranks[0]),
        ),
        stored=stored | dict(_trained(flats, moments)) | own_random(folder),
    )


def _of_zero(file: Path, *, verify: bool) -> Saved:
    saved = load(file, verify=verify).get("optimizer_state_dict")
    known = ("fp32_flat_groups", "single_partition_of_fp32_groups")
    if not isinstance(saved, Mapping) or not any(key in saved for key in known):
        raise CheckpointError(f"{file}: holds no master weights of ZeRO")
    return saved


def _is_sharded(ranks: Sequence[Saved]) -> bool:
    """Whether it is stage 3."""
    return "fp32_flat_groups" in ranks[0]


def _require_complete(folder: Path, models: Sequence[Saved], ranks: Sequence[Saved]) -> None:
    if not models:
        raise CheckpointError(f"{folder}: no *_model_states.pt")
    if not ranks:
        raise CheckpointError(
            f"{folder}: no *_optim_states.pt: incomplete, or not saved under ZeRO-1, 2 or 3"
        )
    expected = models[0]["dp_world_size"]
    if len(ranks) != expected:
        raise CheckpointError(
            f"{folder}: has the optimizer state of {len(ranks)} ranks, {expected} saved"
        )
    if _is_sharded(ranks) and len(models) != expected:
        raise CheckpointError(
            f"{folder}: has model states of {len(models)} ranks, {expected} saved"
        )
    count = ranks[0].get("partition_count", expected)
    if {*(count if isinstance(count, list) else [count])} != {expected}:
        raise CheckpointError(f"{folder}: sharded within groups of ranks, which is not converted")
    if ranks[0].get("ds_zero_partition_groups") or models[0].get("num_experts"):
        raise CheckpointError(f"{folder}: is of expert parallelism, which is not converted")


def _replicated_flats(
    folder: Path, models: Sequence[Saved], ranks: Sequence[Saved]
) -> Iterator[FlatGroup]:
    """Stages 1 and 2: one flat tensor per optimizer group."""
    bases = [rank["base_optimizer_state"] for rank in ranks]
    if not all(isinstance(base, Mapping) for base in bases):
        raise CheckpointError(f"{folder}: an elastic checkpoint, which is not converted")
    for index, shapes in enumerate(models[0]["param_shapes"]):
        masters = [rank["single_partition_of_fp32_groups"][index] for rank in ranks]
        alignment = ranks[0].get("param_alignment_paddings")
        padding = alignment[index] if alignment else [0] * len(shapes)
        placed = replicated(shapes, padding, [master.numel() for master in masters])
        if not reorders(models[0].get("ds_config")):
            mappings = [rank["param_slice_mappings"][index] for rank in ranks]
            require_same_account(placed, mappings, folder)
        group = bases[0]["param_groups"][index]
        states = [base["state"].get(group["params"][0], {}) for base in bases]
        yield FlatGroup(index, placed, masters, states, group)


def _sharded_flats(
    folder: Path, models: Sequence[Saved], ranks: Sequence[Saved]
) -> Iterator[FlatGroup]:
    """Stage 3: one flat tensor per sub-group, of which an optimizer group has one or more."""
    optimizers = [rank["optimizer_state_dict"] for rank in ranks]
    groups = optimizers[0]["param_groups"]
    owners = {index: number for number, group in enumerate(groups) for index in group["params"]}
    for index, shapes in enumerate(models[0]["param_shapes"]):
        placed, length = sharded(shapes, len(ranks))
        masters = [
            _in_memory(folder, number, rank["fp32_flat_groups"][index])
            for number, rank in enumerate(ranks)
        ]
        if index not in owners or any(master.numel() < length for master in masters):
            raise CheckpointError(
                f"{folder}: sub-group {index} has not the size that its parameters say; "
                "written by a version of DeepSpeed that is not known here"
            )
        states = [
            {key: _in_memory(folder, number, value) for key, value in saved["state"][index].items()}
            if index in saved["state"] else {}
            for number, saved in enumerate(optimizers)
        ]  # fmt: skip
        yield FlatGroup(owners[index], placed, masters, states, groups[owners[index]])


def _in_memory(folder: Path, rank: int, value: Any) -> Any:
    """A flat tensor that was on disk when it was saved is mapped from the checkpoint's copy."""
    if not isinstance(value, Tensor) or value.numel() or not hasattr(value, "ds_id"):
        return value
    name = require_file_name(f"{value.ds_id}.tensor.swp", str(folder))
    file = folder / "offloaded_tensors" / f"rank{rank:02d}" / name
    if not file.is_file():
        raise CheckpointError(f"{file}: missing; it holds a part of the training state")
    size = file.stat().st_size // value.element_size()
    return torch.from_file(str(file), shared=False, size=size, dtype=value.dtype)


def _moments(flats: Sequence[FlatGroup], folder: Path) -> tuple[str, ...]:
    kinds: list[str] = []
    for flat in flats:
        for state in flat.states:
            kinds = [k for k, v in state.items() if isinstance(v, Tensor) and k != STEP]
            require_moments(kinds, str(folder), next(iter(flat.placed), "a parameter"))
    return tuple(kinds)


def _updates(flats: Sequence[FlatGroup], folder: Path) -> Iterator[tuple[str, int]]:
    for flat in flats:
        counts = {int(state.get(STEP, flat.settings.get(STEP, -1))) for state in flat.states}
        if len(counts) != 1 or -1 in counts:
            raise CheckpointError(f"{folder}: ranks differ in the number of updates, or do not say")
        yield from zip(flat.placed, itertools.repeat(counts.pop()), strict=False)


def _groups(flats: Sequence[FlatGroup]) -> list[ParameterGroup]:
    members: dict[int, list[str]] = {}
    for flat in flats:
        members.setdefault(flat.group, []).extend(flat.placed)
    own = {flat.group: settings(flat.settings) for flat in flats}
    return [
        ParameterGroup(settings=own[number], parameters=members[number])
        for number in sorted(members)
    ]


def _trained(flats: Sequence[FlatGroup], moments: Sequence[str]) -> Iterator[tuple[str, Stored]]:
    for flat in flats:
        tensors = {WEIGHT: flat.masters}
        tensors |= {moment: [state[moment] for state in flat.states] for moment in moments}
        for kind, parts in tensors.items():
            views = [part.detach().view(-1) for part in parts]
            for name, placed in flat.placed.items():
                yield f"{kind}/{name}", placed.stored(views)


def _whole_frozen(
    models: Sequence[Saved], flats: Sequence[FlatGroup]
) -> Iterator[tuple[str, Stored]]:
    """Stages 1 and 2: parameters without a master, which every rank holds whole."""
    known = {*models[0]["buffer_names"], *models[0]["shared_params"]}
    known.update(name for flat in flats for name in flat.placed)
    for name, tensor in models[0]["module"].items():
        if name not in known:
            yield name, whole(tensor)


def _sharded_frozen(models: Sequence[Saved]) -> Iterator[tuple[str, Stored]]:
    """Stage 3: each rank saved its part of every parameter without a master."""
    for name, shape in (models[0]["frozen_param_shapes"] or {}).items():
        parts = [model["frozen_param_fragments"][name].view(-1) for model in models]
        left = math.prod(shape)
        ranges = []
        for part in parts:
            ranges.append(Range(part, 0, min(left, part.numel())))
            left -= ranges[-1].stop
        yield name, Stored(shape=tuple(shape), ranges=ranges)


def loss_scale(rank: Saved) -> LossScale | None:
    """The state of dynamic loss scaling; None without."""
    scaler = rank.get("loss_scaler")
    if not isinstance(scaler, Scaler) or not scaler.dynamic:
        return None
    good = scaler.cur_iter - scaler.last_overflow_iter - 1
    return LossScale(scale=float(scaler.cur_scale), good_steps=good % scaler.scale_window)
