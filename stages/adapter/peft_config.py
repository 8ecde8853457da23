"""The configuration of an adapter, as peft reads it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import StageError
from stages.adapter.compat import import_peft, read_as_experts
from stages.adapter.layers import Layer
from stages.model.declared import ties

if TYPE_CHECKING:
    from torch import nn

    from stages.adapter.lora import Lora

MERGED = "export.safetensors merges it into the model"


def peft_config(stage: Lora, targets: Sequence[str] | None = None) -> Any:
    """The stage as peft's configuration; `targets` in place of its own."""
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


def save_config(
    stage: Lora,
    folder: Path,
    model: nn.Module,
    layers: Sequence[Layer],
    *,
    base: str | None,
    revision: str | None,
) -> None:
    """Write adapter_config.json; `model` has its adapter, of `layers`, `base` is the folder or hub
    id that it was loaded from. Raises StageError when parameters were trained that peft cannot keep
    in an adapter."""
    linear, stacked = _as_modules_and_parameters(stage, model, layers)
    config = peft_config(stage, _short(linear, (name for name, _ in model.named_modules()), 1))
    config.base_model_name_or_path, config.revision = base, revision
    config.inference_mode = True
    config.fan_in_fan_out = any(one.transposed for one in layers if one.experts is None)
    if stacked:
        parameters = (_without_base_layer(name) for name, _ in model.named_parameters())
        config.target_parameters = _short(stacked, parameters, 2)
        config.lora_dropout = 0.0  # peft refuses it there, and only training uses it
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    updates = {name for layer in layers for name in layer.shapes}
    config.modules_to_save = _whole_modules(model, trained - updates) or None
    config.save_pretrained(str(folder))


def _as_modules_and_parameters(
    stage: Lora, model: nn.Module, layers: Sequence[Layer]
) -> tuple[Collection[str], Collection[str]]:
    """Names of the modules that peft is to put updates into, and of the parameters.

    Names that are read as those of experts can only be given as parameters. Raises StageError for
    those with what peft does not do with parameters.
    """
    linear = {layer.name for layer in layers if layer.experts is None}
    ends = {name.rpartition(".")[2] for name in linear}
    experts = {end for end in ends if read_as_experts(model, end)}
    moved = {name for name in linear if name.rpartition(".")[2] in experts}
    if moved and (stage.dora or stage.quantize):
        raise StageError(
            f"peft takes {min(moved)} for experts, and has neither DoRA nor 4 bits for experts",
            hint=MERGED,
        )
    stacked = {layer.weight for layer in layers if layer.experts is not None or layer.name in moved}
    return linear - moved, stacked


def _without_base_layer(name: str) -> str:
    return name.replace(".base_layer.", ".")


def _short(names: Collection[str], all_names: Iterable[str], parts: int) -> list[str]:
    """The last `parts` parts of the names if they mean the same ones, else the whole names."""

    def end(name: str) -> str:
        return ".".join(name.split(".")[-parts:])

    ends = {end(name) for name in names}
    meant = {name for name in all_names if end(name) in ends}
    return sorted(ends if meant == set(names) else names)


def _whole_modules(model: nn.Module, names: Collection[str]) -> list[str]:
    """Modules all of whose parameters were trained as a whole; peft saves nothing smaller."""
    tied = ties(model)
    shared = {*tied, *tied.values()}
    owners = sorted({name.rpartition(".")[0] for name in names})
    for owner in owners:
        parameters = model.get_submodule(owner).named_parameters(recurse=False)
        own = {f"{owner}.{leaf}" for leaf, _ in parameters}
        if own - set(names) or own & shared:
            raise StageError(
                f"{owner}: an adapter cannot express training in part or of a shared weight",
                hint=MERGED,
            )
    return owners
