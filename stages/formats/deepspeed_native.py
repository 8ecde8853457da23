"""A checkpoint of `DeepSpeedEngine.save_checkpoint` under ZeRO-1, 2 or 3, read as a state.

It is read without DeepSpeed and without running anything. Under ZeRO, the master weights of several
parameters make one flat tensor per rank, and so do their moments, in the same places.
"""

from __future__ import annotations

import base64
import functools
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
from stages.formats.stored import MOMENTS, Shape, Stored, flattened, joined, whole

Saved = Mapping[str, Any]
_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_(?:model|optim)_states\.pt"
)


class Scaler:
    """Stands in for DeepSpeed's loss scalers, with their attributes."""

    cur_scale: float
    dynamic: bool
    cur_iter: int
    last_overflow_iter: int
    scale_window: int


class Fragment:
    """Elements [start, start + numel) of a rank's flat tensor."""

    numel: int
    start: int


ADMITTED = [
    (Scaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Scaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


load = functools.partial(stored.load, admitted=ADMITTED)


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
    models = [load(file, verify=reading.verify) for file in _files(state, "model")]
    optimizers = [load(file, verify=reading.verify) for file in _files(state, "optim")]
    ranks = [saved["optimizer_state_dict"] for saved in optimizers]
    sharded = "fp32_flat_groups" in ranks[0]
    expected = models[0]["dp_world_size"]
    there = min(len(ranks), len(models)) if sharded else len(ranks)
    if there != expected:
        raise CheckpointError(f"{state}: has the state of {there} ranks, {expected} saved")
    count = ranks[0].get("partition_count", expected)
    in_groups = {*(count if isinstance(count, list) else [count])} != {expected}
    if in_groups or models[0].get("num_experts"):
        raise CheckpointError(
            f"{state}: sharded within groups of ranks or of experts, which is not converted"
        )
    groups = list(_flat_groups(state, models, ranks, sharded=sharded))
    model, moments = models[0], () if reading.weights_only else MOMENTS
    for group in groups if moments else ():
        name = next(iter(group.shapes), "a parameter")
        stored.require_moments(group.flats.keys() - {WEIGHT}, str(state), name)
        if len(group.counts) != 1 or -1 in group.counts:
            raise CheckpointError(f"{state}: ranks differ in the number of updates, or have none")
    buffers = {name: whole(model["module"][name]) for name in model["buffer_names"]}
    frozen: dict[str, Stored] = {}
    if sharded:  # parameters without a master, of which each rank holds a part
        for name, shape in (model["frozen_param_shapes"] or {}).items():
            cut = _cut_each({name: shape}, len(models))[name]
            held = [saved["frozen_param_fragments"][name] for saved in models]
            frozen[name] = joined(shape, [flattened(held[rank])[:stop] for rank, _, stop in cut])
    else:  # every rank has them whole
        known = {*buffers, *model["shared_params"]}.union(*(group.shapes for group in groups))
        frozen = {name: whole(t) for name, t in model["module"].items() if name not in known}
    trained = {
        f"{kind}/{name}": joined(group.shapes[name], [group.flats[kind][r][a:b] for r, a, b in own])
        for group in groups
        for kind in (WEIGHT, *moments)
        for name, own in group.places.items()
    }
    numbered = [list(own) for _, own in itertools.groupby(groups, key=lambda group: group.number)]
    progress, random = _of_pipetrain(folder)
    return source_of(
        folder,
        model,
        progress=progress,
        samples=reading.samples,
        frozen=list(frozen),
        groups=[
            stored.group(own[0].settings, [n for one in own for n in one.shapes], moments)
            for own in numbered
        ],
        updates={n: max(g.counts) for g in groups for n in g.shapes} if moments else {},
        optimizer=ranks[0],
        tensors={f"{WEIGHT}/{name}": value for name, value in (frozen | buffers).items()}
        | trained
        | random,
    )


def source_of(
    where: Path, model: Saved, *, progress: Saved | None, samples: int, frozen: Sequence[str],
    groups: Sequence[ParameterGroup], updates: Mapping[str, int], optimizer: Saved,
    tensors: Mapping[str, Stored],
) -> StateSource:  # fmt: skip
    """The state of one of DeepSpeed's checkpoints, by the contents of its `*_model_states.pt` and
    of an optimizer's file; `progress` is a pipetrain run's."""
    step, skipped = int(model["global_steps"]), int(model.get("skipped_steps") or 0)
    scaler, scale = optimizer.get("loss_scaler"), None
    if isinstance(scaler, Scaler) and scaler.dynamic:
        good = scaler.cur_iter - scaler.last_overflow_iter - 1
        scale = LossScale(scale=float(scaler.cur_scale), good_steps=good % scaler.scale_window)
    return stored.MappedSource(
        where=str(where),
        step=step,
        world_size=int(model["dp_world_size"]),
        writer={"format": "deepspeed", "packages": {"deepspeed": model.get("ds_version")}},
        progress=progress or vars(Progress(step=step, samples=samples, skipped=skipped)),
        state=EngineState(
            aliases=dict(model["shared_params"]),
            frozen=frozen,
            groups=groups,
            updates=updates,
            loss_scale=scale,
        ),
        stored=tensors,
    )


def _files(folder: Path, kind: str) -> list[Path]:
    """Files of all ranks, in rank order. Raises CheckpointError for other parallelism than ZeRO."""
    found = {}
    for file in folder.glob(f"*_{kind}_states.pt"):
        match = _FILE.fullmatch(file.name)
        if match is None or int(match["mp"]):
            raise CheckpointError(
                f"{file}: is of tensor, pipeline or expert parallelism, which is not converted"
            )
        found[int(match["dp"] or 0)] = file
    if not found or max(found) >= len(found):
        raise CheckpointError(
            f"{folder}: has a *_{kind}_states.pt for the ranks {sorted(found)}: incomplete, or not "
            "saved under ZeRO-1, 2 or 3"
        )
    return [found[rank] for rank in sorted(found)]


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
        for saved, base in zip(ranks, bases, strict=True):
            state = {"step": group.get("step", -1), **base["state"].get(index, {})}
            states.append(state | {WEIGHT: saved[masters][index]})
        counts = {int(state.pop("step")) for state in states}
        tensors = (k for k in states[0] if all(isinstance(s.get(k), Tensor) for s in states))
        flats = {kind: [flattened(state[kind]) for state in states] for kind in tensors}
        if sharded:
            places = _cut_each(shapes, len(ranks))
        else:
            places = _cut_as_one(shapes, flats[WEIGHT], index, ranks)
            mappings = [rank["param_slice_mappings"][index] for rank in ranks]
            # Each rank's fragments are the other record of the places in the files.
            for name in {*places}.union(*mappings):
                own = ((rank, one[name]) for rank, one in enumerate(mappings) if name in one)
                fragments = [Place(rank, part.start, part.start + part.numel) for rank, part in own]
                if fragments != places.get(name):
                    raise CheckpointError(
                        f"{folder}: the files disagree on where {name} lies in the flat tensors; "
                        "saved with round_robin_gradients, or by an unknown version of DeepSpeed"
                    )
        yield FlatGroup(owners[index], shapes, places, flats, counts, group)


def _cut_each(shapes: Mapping[str, Shape], ranks: int) -> dict[str, list[Place]]:
    """Stage 3: each parameter is cut into a part per rank, the last ones padded; the flat tensor of
    a rank is its parts of all parameters."""
    found = {}
    offset = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // ranks)
        sizes = (min(part, numel - rank * part) for rank in range(ranks))
        found[name] = [Place(r, offset, offset + size) for r, size in enumerate(sizes) if size > 0]
        offset += part
    return found


def _cut_as_one(
    shapes: Mapping[str, Shape], flats: Sequence[Tensor], index: int, ranks: Sequence[Saved]
) -> dict[str, list[Place]]:
    """Stages 1 and 2: each rank has a part of a vector of all parameters, padded one by one."""
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


def _of_pipetrain(folder: Path) -> tuple[dict[str, Any] | None, dict[str, Stored]]:
    """The progress of a pipetrain run, None in another tool's checkpoint, and the states of the
    generators of every rank, by key."""
    file, progress, found = folder / stored.PROGRESS, None, dict[str, Stored]()
    if file.is_file():
        with stored.understood(file, "pipe"):
            record = stored.read_json(file)["progress"]
            progress = vars(Progress.from_record(record, str(file)))
    for file in folder.glob("random-*.json"):
        rank = int(file.stem.removeprefix("random-"))
        for name, text in stored.read_json(file).items():
            data = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            found[random_key(rank, name)] = whole(data)
    return progress, found
