"""DeepSpeed's universal checkpoint, read as a state: a folder per parameter, a file per kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.checkpoint.formats import Reading, StateSource
from pipeline.contracts.engine import WEIGHT, EngineState, ParameterGroup
from pipeline.errors import CheckpointError
from stages.formats.deepspeed_files import load
from stages.formats.deepspeed_native import loss_scale
from stages.formats.files import load as load_any
from stages.formats.mapped import (
    MOMENTS,
    MappedSource,
    Range,
    Shape,
    Stored,
    flattened,
    fresh_progress,
    require_file_name,
    require_moments,
    settings,
    whole,
)

FP32 = "fp32"
"""DeepSpeed's name of the file of a master weight."""


def open_universal(folder: Path, reading: Reading) -> StateSource:
    """The state in the folder of a tag. Raises CheckpointError."""
    files = sorted(folder.glob("*_model_states.pt"))
    if not files:
        raise CheckpointError(f"{folder}: no *_model_states.pt")
    model = load(files[0])
    optimizer = load(folder / "zero" / "optimizer_state.pt")
    shapes: dict[str, Shape] = {
        name: tuple(shape) for group in model["param_shapes"] for name, shape in group.items()
    }
    step = int(model["global_steps"])
    moments = () if reading.weights_only else MOMENTS
    stored = dict(_trained(folder / "zero", shapes, moments))
    others = dict(_untrained(folder / "zero", model, shapes))
    steps = 0 if reading.weights_only else _steps(folder / "zero", shapes, optimizer)
    return MappedSource(
        where=str(folder),
        step=step,
        world_size=int(model["dp_world_size"]),
        writer={"format": "deepspeed", "packages": {"deepspeed": model.get("ds_version")}},
        progress=model.get("progress") or fresh_progress(step, reading.samples),
        state=EngineState(
            aliases=dict(model["shared_params"]),
            frozen=[name for name in others if name not in model["buffer_names"]],
            groups=list(_groups(model["param_shapes"], optimizer["param_groups"], folder)),
            updates=dict.fromkeys(shapes, steps) if moments else {},
            moments=list(moments),
            loss_scale=loss_scale(optimizer),
        ),
        stored=stored | {f"{WEIGHT}/{name}": value for name, value in others.items()},
    )


def _trained(
    folder: Path, shapes: Mapping[str, Shape], moments: Sequence[str]
) -> Iterator[tuple[str, Stored]]:
    for name, shape in shapes.items():
        own = folder / require_file_name(name, str(folder))
        if moments:
            kinds = [kind for kind in MOMENTS if (own / f"{kind}.pt").is_file()]
            require_moments(kinds, str(folder), name)
        for kind, file in {WEIGHT: FP32, **{moment: moment for moment in moments}}.items():
            flat = flattened(_tensor(own / f"{file}.pt"))
            yield f"{kind}/{name}", Stored(shape=shape, ranges=[Range(flat, 0, flat.numel())])


def _untrained(
    folder: Path, model: Mapping[str, Any], shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, Stored]]:
    """Frozen parameters and buffers."""
    wanted = {*(model["frozen_param_shapes"] or {}), *model["buffer_names"]}
    there = {path.name for path in folder.iterdir() if path.is_dir()}
    for name in sorted((wanted | there) - {*shapes, *model["shared_params"]}):
        file = folder / require_file_name(name, str(folder)) / f"{FP32}.pt"
        yield name, whole(_tensor(file))


def _tensor(file: Path) -> Tensor:
    content = load_any(file)
    tensor = content.get("param") if isinstance(content, Mapping) else content
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{file}: holds no tensor")
    return tensor


def _steps(folder: Path, shapes: Mapping[str, Shape], optimizer: Mapping[str, Any]) -> int:
    """The one count of updates that DeepSpeed keeps."""
    file = folder / next(iter(shapes)) / "step.pt"
    if file.is_file():
        return int(load_any(file))
    return int(optimizer["optimizer_state_dict"]["state"][0]["step"])


def _groups(
    shapes: Sequence[Mapping[str, Shape]], groups: Sequence[Mapping[str, Any]], folder: Path
) -> Iterator[ParameterGroup]:
    """`shapes` are of groups, or under stage 3 of their sub-groups."""
    if sorted(index for group in groups for index in group["params"]) != list(range(len(shapes))):
        raise CheckpointError(f"{folder}: optimizer groups and parameters do not belong together")
    for group in groups:
        names = [name for index in group["params"] for name in shapes[index]]
        yield ParameterGroup(settings=settings(group), parameters=names)
