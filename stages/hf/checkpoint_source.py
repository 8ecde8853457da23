"""A checkpoint of transformers' Trainer, read as a state.

Its `optimizer.pt` numbers parameters; their names are as in the model in `config.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pipeline import WEIGHT, CheckpointError, EngineState, ParameterGroup, Progress
from pipeline.checkpoint import Reading, StateSource
from stages.formats import stored
from stages.formats.stored import MOMENTS, Shape, Stored, whole
from stages.model.files import safetensors_files

WITHOUT = "--weights-only takes only the weights"


class Model(NamedTuple):
    """Names and shapes of a model."""

    shapes: Mapping[str, Shape]
    """Parameters and stored buffers, tied ones once."""
    parameters: Sequence[str]
    decayed: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = {}


def open_trainer(folder: Path, step_file: Path, reading: Reading) -> StateSource:
    """The training state in a folder, of the step in `step_file`. Raises CheckpointError."""
    step = stored.read_json(step_file).get("global_step")
    if not isinstance(step, int):
        raise CheckpointError(f"{step_file}: does not say the step")
    weights: dict[str, Stored] = {}
    for file in safetensors_files(folder):
        try:
            with safe_open(file, "pt") as tensors:
                weights |= {key: whole(tensors.get_tensor(key)) for key in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
    if reading.weights_only and not (folder / "config.json").is_file():
        # The Trainer writes no config.json for a model that is not transformers' own.
        model = Model({name: tensor.shape for name, tensor in weights.items()}, list(weights))
    else:
        model = _described(folder / "config.json")
    shapes = {name: tensor.shape for name, tensor in weights.items() if name not in model.aliases}
    for name in sorted(shapes.keys() | model.shapes.keys()):
        if shapes.get(name) != model.shapes.get(name):
            raise CheckpointError(
                f"{folder}: {name} has shape {shapes.get(name, 'none')} in the files and "
                f"{model.shapes.get(name, 'none')} in the model of config.json",
                hint="to use only its weights, load the folder as a model",
            )
    found = {f"{WEIGHT}/{name}": weights[name] for name in model.shapes}
    groups: list[ParameterGroup] = []
    updates: dict[str, int] = {}
    for saved, states in () if reading.weights_only else _optimizer(folder, model):
        groups.append(stored.group(saved, list(states)))
        for name, state in states.items():
            updates[name] = int(state["step"])
            found |= {f"{moment}/{name}": whole(state[moment]) for moment in MOMENTS}
    frozen = [name for name in model.parameters if name not in updates]
    return stored.MappedSource(
        where=str(folder),
        step=step,
        world_size=1,
        writer={"format": "trainer"},
        progress=vars(Progress(step=step, samples=reading.samples)),
        state=EngineState(
            aliases=model.aliases, frozen=frozen, groups=groups, updates=updates, loss_scale=None
        ),
        stored=found,
    )


def _described(config: Path) -> Model:
    """The model of a `config.json`, built without memory. Raises CheckpointError."""
    import transformers

    if not config.is_file():
        raise CheckpointError(f"{config}: missing; it describes the model")
    try:
        described = transformers.AutoConfig.from_pretrained(
            config.parent, local_files_only=True, trust_remote_code=False
        )
        kind = getattr(transformers, described.architectures[0])
        if not issubclass(kind, transformers.PreTrainedModel):
            raise TypeError(f"{kind.__name__} is not a model")
        with torch.device("meta"):
            model: nn.Module = kind(described)
    except Exception as error:
        raise CheckpointError(
            f"{config}: its model cannot be built: {error}",
            hint="models with remote code are not converted",
        ) from error
    parameters = dict(model.named_parameters())
    first = {id(parameter): name for name, parameter in parameters.items()}
    aliases = {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name not in parameters
    }
    values = model.state_dict()
    return Model(
        shapes={name: tuple(values[name].shape) for name in values if name not in aliases},
        parameters=list(parameters),
        decayed=frozenset(transformers.Trainer.get_decay_parameter_names(None, model)),
        aliases=aliases,
    )


def _optimizer(
    folder: Path, model: Model
) -> Iterator[tuple[dict[str, Any], dict[str, Mapping[str, Any]]]]:
    """For each optimizer group its settings, and the state of each parameter by name."""
    file = folder / "optimizer.pt"
    if not file.is_file():
        raise CheckpointError(
            f"{file}: missing; it holds the optimizer's state",
            hint=f"it was not saved (save_only_model), or not by one process or DDP; {WITHOUT}",
        )
    saved = stored.load(file)
    with stored.understood(file, "transformers' Trainer"):
        groups = saved["param_groups"]
        if len(groups) != 2:
            raise CheckpointError(
                f"{file}: has {len(groups)} parameter groups, the Trainer makes 2", hint=WITHOUT
            )
        for group, decays in zip(groups, (True, False), strict=True):
            own = [saved["state"][number] for number in group["params"]]
            for state in own:
                kinds = [k for k, value in state.items() if isinstance(value, Tensor)]
                stored.require_moments({*kinds} - {"step"}, str(file), "a parameter")
            candidates = [
                (n, model.shapes[n]) for n in model.parameters if (n in model.decayed) == decays
            ]
            names = identify([tuple(state[MOMENTS[0]].shape) for state in own], candidates, file)
            yield group, dict(zip(names, own, strict=True))


def identify(
    saved: Sequence[Shape], candidates: Sequence[tuple[str, Shape]], file: Path
) -> list[str]:
    """Names of the candidates with the saved shapes, in the same order; candidates between them
    were frozen. Raises CheckpointError unless there is exactly one such choice."""
    # A greedy match from both ends is the same exactly if there is only one.
    both = list[list[str]]()
    for shapes, others in ((saved, candidates), (saved[::-1], candidates[::-1])):
        rest = iter(others)
        found = (next((name for name, shape in rest if shape == one), "") for one in shapes)
        both.append(list(found))
    early, late = both
    if "" in early or early != late[::-1]:
        raise CheckpointError(
            f"{file}: its numbered parameters match none or several of the parameters in "
            "config.json, by shapes and by the groups that the Trainer makes",
            hint=WITHOUT,
        )
    return early
