"""An adapter in the files of peft: its configuration and its tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline import StageError, TensorReader
from stages.adapter.compat import PREFIX, WEIGHTS, Layer, import_peft, name_in_file, read_as_experts
from stages.adapter.settings import AdaptedModel, LoraSettings
from stages.model.declared import listed, ties
from stages.weights.converted import Change, ConvertedReader, renamed
from stages.weights.files import SafetensorsReader

MERGED = "export.safetensors merges it into the model"


def peft_config(stage: LoraSettings, targets: Sequence[str] | None = None) -> Any:
    """Return the stage as peft's configuration, with other `targets` if they are given."""
    own = stage.targets if isinstance(stage.targets, str) else list(stage.targets)
    return import_peft().LoraConfig(
        task_type="CAUSAL_LM",
        r=stage.rank,
        lora_alpha=stage.alpha,
        lora_dropout=stage.dropout,
        target_modules=own if targets is None else targets,
        use_rslora=stage.scaling == "rslora",
        use_dora=stage.dora,
    )


def save_config(source: AdaptedModel, folder: Path) -> None:
    """Write adapter_config.json of a model with its adapter. Raises StageError when parameters were
    trained that peft cannot keep in an adapter."""
    stage, model, layers = source.stage, source.outline, source.layers
    linear = {layer.name for layer in layers if layer.experts is None}
    # peft takes some names of linear layers for names of experts, which can only be parameters.
    experts = {end for end in {_end(name, 1) for name in linear} if read_as_experts(model, end)}
    moved = {name for name in linear if _end(name, 1) in experts}
    if moved and (stage.dora or stage.quantize):
        raise StageError(
            f"peft takes {min(moved)} for experts, and has neither DoRA nor 4 bits for experts",
            hint=MERGED,
        )
    stacked = {layer.weight for layer in layers if layer.experts is not None or layer.name in moved}
    config = peft_config(stage, _short(linear - moved, (n for n, _ in model.named_modules()), 1))
    config.base_model_name_or_path, config.revision = source.location, source.revision
    config.inference_mode = True
    config.fan_in_fan_out = any(one.transposed for one in layers if one.experts is None)
    if stacked:
        names = (name.replace(".base_layer.", ".") for name, _ in model.named_parameters())
        config.target_parameters = _short(stacked, names, 2)
        config.lora_dropout = 0.0  # peft refuses it there, and only training uses it
    whole = set(source.trained).difference(*(layer.shapes for layer in layers))
    tied = ties(model)
    owners = sorted({name.rpartition(".")[0] for name in whole})
    for owner in owners:  # peft saves nothing smaller than modules
        parameters = model.get_submodule(owner).named_parameters(recurse=False)
        own = {f"{owner}.{leaf}" for leaf, _ in parameters}
        if own - whole or own & {*tied, *tied.values()}:
            raise StageError(
                f"{owner}: an adapter cannot express training in part or of a shared weight",
                hint=MERGED,
            )
    config.modules_to_save = owners or None
    config.save_pretrained(str(folder))


def _end(name: str, parts: int) -> str:
    return ".".join(name.split(".")[-parts:])


def _short(names: Collection[str], all_names: Iterable[str], parts: int) -> list[str]:
    """The last `parts` parts of the names if they mean the same ones, else the whole names."""
    ends = {_end(name, parts) for name in names}
    meant = {name for name in all_names if _end(name, parts) in ends}
    return sorted(ends if meant == set(names) else names)


def _in_file(source: AdaptedModel) -> dict[str, tuple[str, Layer | None]]:
    """Name of a trained tensor of the module -> its name in peft's file, and the stacked weight
    that it is a factor of, if any."""
    factors = {
        name: (stored, None if layer.experts is None else layer)
        for layer in source.layers
        for name, stored in layer.in_file.items()
    }
    return {name: factors.get(name) or (name_in_file(name), None) for name in source.trained}


def changes_to_file(source: AdaptedModel) -> Iterator[Change]:
    """Yield the changes that turn the trained tensors into the tensors of peft's file.

    peft keeps the factors of all experts as matrices: A is (experts * rank, inputs), B is
    (outputs, rank * experts) with the number of the expert running fastest.
    """
    for name, (stored, layer) in _in_file(source).items():
        if layer is None:
            yield renamed(name, stored)
        elif name == layer.down:
            yield _change(name, stored, lambda factors: factors.flatten(0, 1))
        else:
            yield _change(name, stored, lambda factors: factors.permute(1, 2, 0).flatten(1))


def saved_updates(source: AdaptedModel, folder: Path) -> TensorReader:
    """Return the trained tensors from the adapter in `folder`, under the model's names.

    The weight of a head, which peft saves next to its update, is not read. Raises StageError when
    the adapter is of another model or of other settings.
    """
    reader = SafetensorsReader([folder / WEIGHTS])
    stored = {name_in_file(name): name for name in reader.names()}
    wanted = {in_file: (name, layer) for name, (in_file, layer) in _in_file(source).items()}
    missing = wanted.keys() - stored.keys()
    extra = stored.keys() - wanted.keys() - {PREFIX + layer.weight for layer in source.layers}
    refusal = f"the adapter in {folder} is not of this model and these settings"
    if missing or extra:
        parts = [f"missing {listed(missing)}"] * bool(missing)
        parts += [f"unexpected {listed(extra)}"] * bool(extra)
        raise StageError(
            f"{refusal}: {'; '.join(parts)}",
            hint="targets, target_parameters, dora and train_also must be those that it was "
            "trained with",
        )
    shapes = {name: tuple(one.shape) for name, one in source.outline.named_parameters()}
    changes = []
    for in_file, (name, layer) in wanted.items():
        needed, change = shapes[name], renamed(stored[in_file], name)
        if layer is not None:
            count, rank = layer.experts, layer.rank
            assert count is not None
            rows = (count, rank, -1) if name == layer.down else (-1, rank, count)
            order = (0, 1, 2) if name == layer.down else (2, 0, 1)
            together = count * rank
            needed = (together, layer.inputs) if name == layer.down else (layer.outputs, together)
            change = _change(stored[in_file], name, partial(_factors, rows, order))
        found = reader.spec(stored[in_file]).shape
        if found != needed:
            raise StageError(f"{refusal}: {name} has shape {list(found)} instead of {list(needed)}")
        changes.append(change)
    return ConvertedReader(reader, changes)


def _change(old: str, new: str, move: Callable[[Tensor], Tensor]) -> Change:
    return Change(sources=(old,), convert=lambda tensors: {new: move(tensors[old])})


def _factors(shape: Sequence[int], order: Sequence[int], flat: Tensor) -> Tensor:
    """The factors of each expert from peft's matrix."""
    return flat.reshape(*shape).permute(*order).contiguous()
