"""The names of the parameters that an `optimizer.pt` of transformers' Trainer numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from pipeline.errors import CheckpointError
from stages.formats.mapped import Shape
from stages.model.compat import converts_weights

CONFIG = "config.json"
Named = Sequence[tuple[str, Shape]]


class Described(NamedTuple):
    """The model of a `config.json`, as far as names go."""

    groups: tuple[Named, Named]
    """Parameters with and without weight decay, in the Trainer's order."""
    shapes: dict[str, Shape]
    """Parameters and stored buffers, tied ones once."""
    parameters: set[str]
    aliases: dict[str, str]
    converted: bool
    """Whether files of the architecture have other names or shapes than its module."""


def describe(folder: Path) -> Described:
    """Build the model without memory. Raises CheckpointError for one that transformers lacks."""
    model = _build(folder)
    from transformers import Trainer

    decayed = set(Trainer.get_decay_parameter_names(None, model))
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    first = {id(p): name for name, p in model.named_parameters()}
    stored = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    aliases = {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name not in own
    }
    return Described(
        groups=(
            [(name, shape) for name, shape in own.items() if name in decayed],
            [(name, shape) for name, shape in own.items() if name not in decayed],
        ),
        shapes={name: shape for name, shape in stored.items() if name not in aliases},
        parameters=set(own),
        aliases=aliases,
        converted=converts_weights(model),
    )


def undescribed(shapes: dict[str, Shape]) -> Described:
    """The tensors of a file as they are: the Trainer describes no model that is not transformers'
    own."""
    return Described(
        groups=((), ()), shapes=shapes, parameters=set(shapes), aliases={}, converted=False
    )


def identify(saved: Sequence[Shape], candidates: Named, where: str) -> list[str]:
    """The candidates that have the saved shapes, in this order; those left out were frozen. Raises
    CheckpointError when there is no such choice, or more than one."""
    early = _first_fit(saved, candidates)
    late = _first_fit(saved[::-1], candidates[::-1])
    if early is None or late is None:
        raise CheckpointError(
            f"{where}: its parameters are not those of the model in config.json, or not in the "
            "groups that the Trainer makes",
            hint="--weights-only takes the weights alone",
        )
    for one, other in zip(early, late[::-1], strict=True):
        if one != other:
            raise CheckpointError(
                f"{where}: numbers its parameters, and as some were frozen, number "
                f"{early.index(one)} of a group could be {one} or {other}",
                hint="--weights-only takes the weights alone",
            )
    return early


def _first_fit(saved: Sequence[Shape], candidates: Named) -> list[str] | None:
    """Each saved shape with the first candidate behind the last one's that has it. Fitting from
    both ends gives the same exactly when there is one way only."""
    found = []
    rest = iter(candidates)
    for shape in saved:
        name = next((name for name, other in rest if other == shape), None)
        if name is None:
            return None
        found.append(name)
    return found


def _build(folder: Path) -> nn.Module:
    import transformers

    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder / CONFIG}: missing; it describes the model")
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        kind = getattr(transformers, config.architectures[0])
        if not issubclass(kind, transformers.PreTrainedModel):
            raise TypeError(f"{kind.__name__} is no model")
        with torch.device("meta"):
            model: nn.Module = kind(config)
    except Exception as error:
        raise CheckpointError(
            f"{folder / CONFIG}: its model cannot be built: {error}",
            hint="models with code of their own are not converted",
        ) from error
    return model
