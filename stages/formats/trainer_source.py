"""A checkpoint of transformers' Trainer, read as a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.checkpoint.formats import Reading, StateSource
from pipeline.contracts.engine import WEIGHT, EngineState, ParameterGroup
from pipeline.errors import CheckpointError
from stages.formats import files
from stages.formats.files import read_json
from stages.formats.mapped import (
    MOMENTS,
    MappedSource,
    Stored,
    fresh_progress,
    require_file_name,
    require_moments,
    settings,
    whole,
)
from stages.formats.trainer import STATE, WEIGHTS
from stages.formats.trainer_names import CONFIG, Described, describe, identify, undescribed

OPTIMIZER = "optimizer.pt"


class _Optimizer(NamedTuple):
    """An optimizer's state by parameter name."""

    groups: Sequence[ParameterGroup] = ()
    updates: Mapping[str, int] = {}
    stored: Mapping[str, Stored] = {}


def open_trainer(folder: Path, reading: Reading) -> StateSource:
    """The state in `checkpoint-N`. Raises CheckpointError."""
    step = read_json(folder / STATE).get("global_step")
    if not isinstance(step, int):
        raise CheckpointError(f"{folder / STATE}: does not say the step")
    weights = {name: whole(tensor) for name, tensor in _weights(folder)}
    if reading.weights_only and not (folder / CONFIG).is_file():
        model = undescribed({name: tensor.shape for name, tensor in weights.items()})
    else:
        model = describe(folder)
    _require_same(folder, model, weights)
    optimizer = _Optimizer() if reading.weights_only else _optimizer(folder, model)
    untrained = [name for name in model.parameters if name not in optimizer.updates]
    stored = {f"{WEIGHT}/{name}": weights[name] for name in model.shapes}
    return MappedSource(
        where=str(folder),
        step=step,
        world_size=1,
        writer={"format": "trainer"},
        progress=fresh_progress(step, reading.samples),
        state=EngineState(
            aliases=model.aliases,
            frozen=untrained,
            groups=optimizer.groups,
            updates=optimizer.updates,
            moments=list(MOMENTS) if optimizer.updates else [],
            loss_scale=None,
        ),
        stored=stored | dict(optimizer.stored),
    )


def _weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors of all files, mapped."""
    names = [WEIGHTS[0]]
    if not (folder / WEIGHTS[0]).is_file():
        index = read_json(folder / WEIGHTS[1]).get("weight_map")
        if not isinstance(index, dict):
            raise CheckpointError(f"{folder / WEIGHTS[1]}: has no weight_map")
        names = sorted({str(name) for name in index.values()})
    for name in names:
        file = folder / require_file_name(name, str(folder / WEIGHTS[1]))
        try:
            with safe_open(file, "pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 - it is no dict
                    yield key, tensors.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error


def _require_same(folder: Path, model: Described, weights: Mapping[str, Stored]) -> None:
    if model.converted and (weights.keys() ^ model.shapes.keys()) - model.aliases.keys():
        raise CheckpointError(
            f"{folder}: this architecture's files store weights under other names or in other "
            "shapes than the model has, which is not converted",
            hint="for its weights alone, load the folder as a model",
        )
    for name, shape in model.shapes.items():
        if name not in weights:
            raise CheckpointError(f"{folder}: holds no {name}, which config.json's model has")
        if weights[name].shape != shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {list(weights[name].shape)}, in config.json's model "
                f"{list(shape)}"
            )
    for name in weights:
        if name not in model.shapes and name not in model.aliases:
            raise CheckpointError(f"{folder}: holds {name}, which config.json's model has not")


def _optimizer(folder: Path, model: Described) -> _Optimizer:
    file = folder / OPTIMIZER
    if not file.is_file():
        raise CheckpointError(
            f"{file}: missing; it holds the optimizer's state",
            hint="it was not saved (save_only_model), or not by one process or DDP; --weights-only "
            "takes the weights alone",
        )
    saved = files.load(file)
    groups: list[ParameterGroup] = []
    updates: dict[str, int] = {}
    stored: dict[str, Stored] = {}
    with files.understood(file, "transformers' Trainer"):
        if len(saved["param_groups"]) != len(model.groups):
            raise CheckpointError(
                f"{file}: has {len(saved['param_groups'])} parameter groups, the Trainer makes "
                f"{len(model.groups)}",
                hint="--weights-only takes the weights alone",
            )
        for group, candidates in zip(saved["param_groups"], model.groups, strict=True):
            own = [saved["state"][number] for number in group["params"]]
            for state in own:
                _require_adam(state, file)
            shapes = [tuple(state[MOMENTS[0]].shape) for state in own]
            names = identify(shapes, candidates, str(file))
            groups.append(ParameterGroup(settings=settings(group), parameters=names))
            for name, state in zip(names, own, strict=True):
                updates[name] = int(state["step"])
                stored |= {f"{moment}/{name}": whole(state[moment]) for moment in MOMENTS}
    return _Optimizer(groups, updates, stored)


def _require_adam(state: Mapping[str, Any], file: Path) -> None:
    kinds = [key for key, value in state.items() if isinstance(value, Tensor) and key != "step"]
    require_moments(kinds, str(file), "a parameter")
