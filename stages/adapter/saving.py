"""An adapter's configuration, as peft reads it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import StageError
from stages.adapter.injection import Layer, peft_config
from stages.model.declared import ties

if TYPE_CHECKING:
    from torch import nn

    from stages.adapter.lora import Lora

HINT = "export.safetensors merges it into the model"


def save_config(
    stage: Lora,
    folder: Path,
    *,
    model: nn.Module,
    layers: Sequence[Layer],
    trained: Collection[str],
    base: str | None,
    revision: str | None,
) -> None:
    """Write adapter_config.json; `model` has its adapter, `base` is where it was loaded from.

    Raises StageError when parameters were trained that peft cannot keep in an adapter.
    """
    config = peft_config(stage, short_names(model, layers))
    config.base_model_name_or_path, config.revision = base, revision
    config.inference_mode = True
    config.fan_in_fan_out = any(layer.transposed for layer in layers)
    updates = {name for one in layers for name in (one.down, one.up, one.magnitude)}
    config.modules_to_save = _whole_modules(model, set(trained) - updates) or None
    config.save_pretrained(str(folder))


def short_names(model: nn.Module, layers: Sequence[Layer]) -> list[str]:
    """The last parts of the layers' names if they mean the same layers, else the whole names."""
    adapted = {layer.name for layer in layers}
    ends = {name.rpartition(".")[2] for name in adapted}
    meant = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends}
    return sorted(ends if meant == adapted else adapted)


def _whole_modules(model: nn.Module, names: Collection[str]) -> list[str]:
    """Modules all of whose parameters were trained as a whole; peft saves nothing smaller."""
    tied = ties(model)
    shared = {*tied, *tied.values()}
    owners = sorted({name.rpartition(".")[0] for name in names})
    for owner in owners:
        own = {
            f"{owner}.{leaf}"
            for leaf, _ in model.get_submodule(owner).named_parameters(recurse=False)
        }
        if not own <= set(names):
            raise StageError(
                f"{owner} was trained in part, which an adapter cannot express", hint=HINT
            )
        if own & shared:
            raise StageError(
                f"{owner} was trained and shares its weight with another module, which an adapter "
                "cannot express",
                hint=HINT,
            )
    return owners
