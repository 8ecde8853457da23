"""DeepSpeed's universal checkpoint: a folder per parameter, with a file per kind of tensor."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline import WEIGHT, CheckpointError
from pipeline.checkpoint import Reading, StateSource, appearing
from stages.formats import stored
from stages.formats.deepspeed_native import load, source_of
from stages.formats.stored import MOMENTS, Shape, Stored, joined, whole

FILES = {WEIGHT: "fp32", **{moment: moment for moment in MOMENTS}}
"""Names of the files of a parameter's folder, by kind."""
MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""Files in which stages 1 and 2, and stage 3, look for everything but tensors."""


def open_universal(folder: Path, reading: Reading) -> StateSource:
    """The state in the folder of a tag. Raises CheckpointError."""
    model = next(map(load, sorted(folder.glob("*_model_states.pt"))), None)
    if model is None:
        raise CheckpointError(f"{folder}: no *_model_states.pt")
    zero = folder / "zero"
    optimizer = load(zero / "optimizer_state.pt")
    # Each entry is an optimizer group, or under stage 3 a sub-group of one.
    parts, saved = model["param_shapes"], optimizer["param_groups"]
    if sorted(index for group in saved for index in group["params"]) != list(range(len(parts))):
        raise CheckpointError(f"{folder}: optimizer groups and parameters do not belong together")
    shapes: dict[str, Shape] = {n: tuple(shape) for part in parts for n, shape in part.items()}
    moments = () if reading.weights_only else MOMENTS
    found: dict[str, Stored] = {}
    for name, shape in shapes.items():
        own = zero / stored.require_file_name(name, str(zero))
        if moments:
            present = [kind for kind in MOMENTS if (own / f"{kind}.pt").is_file()]
            stored.require_moments(present, str(zero), name)
        for kind in (WEIGHT, *moments):
            found[f"{kind}/{name}"] = joined(shape, [_tensor(own / f"{FILES[kind]}.pt")])
    # Frozen parameters and buffers.
    wanted = {*(model["frozen_param_shapes"] or {}), *model["buffer_names"]}
    folders = {path.name for path in zero.iterdir() if path.is_dir()}
    others = sorted((wanted | folders) - {*shapes, *model["shared_params"]})
    for name in others:
        own = zero / stored.require_file_name(name, str(zero))
        found[f"{WEIGHT}/{name}"] = whole(_tensor(own / f"{FILES[WEIGHT]}.pt"))
    updates: dict[str, int] = {}
    if moments:  # DeepSpeed keeps one count for all
        file, states = zero / next(iter(shapes)) / "step.pt", optimizer["optimizer_state_dict"]
        count = load(file) if file.is_file() else states["state"][0]["step"]
        updates = dict.fromkeys(shapes, int(count))
    return source_of(
        folder,
        model,
        progress=model.get("progress"),
        samples=reading.samples,
        frozen=[name for name in others if name not in model["buffer_names"]],
        groups=[
            stored.group(one, [name for i in one["params"] for name in parts[i]], moments)
            for one in saved
        ],
        updates=updates,
        optimizer=optimizer,
        tensors=found,
    )


def _tensor(file: Path) -> Tensor:
    content = load(file)
    tensor = content.get("param") if isinstance(content, Mapping) else content
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{file}: holds no tensor")
    return tensor


def write_universal(source: StateSource, folder: Path) -> Sequence[str]:
    """Write `folder`; returns notes for its users. Raises CheckpointError."""
    what = "DeepSpeed's universal checkpoint holds weights with Adam's moments"
    stored.require_adam(source, what)
    updates, *others = sorted(set(source.state.updates.values()))
    if others:
        raise CheckpointError(
            f"{source.where}: DeepSpeed counts updates once for all parameters; here they were "
            f"updated {', '.join(map(str, (updates, *others)))} times"
        )
    tag = f"global_step{source.step}"
    with appearing(folder) as partial:
        zero = partial / tag / "zero"
        zero.mkdir(parents=True)
        for key in source.tensors:
            kind, _, name = key.partition("/")
            if kind in FILES:
                own = zero / stored.require_file_name(name, source.where)
                own.mkdir(exist_ok=True)
                _save({"param": stored.assembled(source, key)}, own / f"{FILES[kind]}.pt")
        for name in source.state.updates:
            # torch's optimizers need a tensor, DeepSpeed's take one.
            _save(torch.tensor(float(updates)), zero / name / "step.pt")
        groups = [
            {**group.settings, "step": updates, "params": [number]}
            for number, group in enumerate(source.state.groups)
        ]
        # Stage 3 gives this very object to all sub-groups. A tensor would be counted up by each of
        # them at every step; with a number, optimizers that need a tensor refuse to continue.
        states = {"state": {0: {"step": updates}}, "param_groups": groups}
        version = importlib.metadata.version("deepspeed")
        optimizer = {
            "param_groups": groups, "optimizer_state_dict": states, "ds_version": version
        }  # fmt: skip
        _save(optimizer, zero / "optimizer_state.pt")
        for file in MODEL_STATES:
            _save(_model_state(source), partial / tag / file)
        (partial / "latest_universal").write_text(tag, encoding="utf-8")
    return list(_notes(source))


def _save(value: Any, file: Path) -> None:
    with file.open("xb") as stream:
        stored.append(value, stream)


def _model_state(source: StateSource) -> dict[str, Any]:
    state = source.state
    shapes = {name: torch.Size(entry.shape) for name, entry in stored.weights_of(source).items()}
    groups = [{name: shapes[name] for name in group.parameters} for group in state.groups]
    return {
        "module": {},
        "buffer_names": [
            name for name in shapes if name not in state.updates and name not in state.frozen
        ],
        "param_shapes": groups,
        "frozen_param_shapes": {name: shapes[name] for name in state.frozen},
        "shared_params": dict(state.aliases),
        **dict.fromkeys(("frozen_param_fragments", "optimizer", "lr_scheduler")),
        **dict.fromkeys(("data_sampler", "random_ltd")),
        "global_steps": source.step,
        "global_samples": source.progress.get("samples", 0),
        "skipped_steps": source.progress.get("skipped", 0),
        "dp_world_size": source.world_size,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": importlib.metadata.version("deepspeed"),
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
        "progress": dict(source.progress),
    }


def _notes(source: StateSource) -> Iterator[str]:
    state = source.state
    yield (
        "load it in DeepSpeed with `checkpoint: {load_universal: true}` and "
        "load_lr_scheduler_states=False; the schedule is not part of the state"
    )
    yield "ZeRO-3: DeepSpeed 0.19 continues it with its own optimizers; torch's stop"
    if len({str(sorted(group.settings.items())) for group in state.groups}) > 1:
        yield (
            "ZeRO-3: DeepSpeed 0.19 uses the first optimizer group's hyperparameters for all "
            "groups, weight decay too: set them again after loading"
        )
    if len(state.updates) < len(stored.weights_of(source)):
        yield "DeepSpeed loads only trained parameters: load the others with the model"
    if state.averages:
        yield f"left out, as the format lacks it: {', '.join(state.averages)} of the weights"
    if state.loss_scale is not None:
        yield "left out: the loss scale, which starts again"
