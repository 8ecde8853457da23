"""Linear layers with updates, made and configured by peft."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import StageError
from stages.adapter.compat import ADAPTER, import_peft, quiet, uninitialised
from stages.model.block_changes import is_linear, linear_layers
from stages.model.declared import ties

if TYPE_CHECKING:
    from torch import nn

    from stages.adapter.lora import Lora

SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A linear layer with an update."""

    name: str
    """Name of the module in the model without updates."""
    rank: int
    scaling: float
    transposed: bool
    """Whether its weight is (inputs, outputs), as GPT-2's are."""
    inputs: int
    outputs: int
    dora: bool

    @property
    def down(self) -> str:
        """Name of the tensor A, shape (rank, inputs)."""
        return f"{self.name}.lora_A.{ADAPTER}.weight"

    @property
    def up(self) -> str:
        """Name of the tensor B, shape (outputs, rank)."""
        return f"{self.name}.lora_B.{ADAPTER}.weight"

    @property
    def magnitude(self) -> str:
        """Name of the lengths of the rows, shape (outputs,), with DoRA."""
        return f"{self.name}.lora_magnitude_vector.{ADAPTER}.weight"

    @property
    def weight(self) -> str:
        """Name of the weight that is updated, in the model without updates."""
        return f"{self.name}.weight"

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of the update's tensors."""
        shapes = {self.down: (self.rank, self.inputs), self.up: (self.outputs, self.rank)}
        return {**shapes, self.magnitude: (self.outputs,)} if self.dora else shapes


def inject(stage: Lora, model: nn.Module) -> None:
    """Put updates into the layers of `model` that the stage names, and freeze everything else but
    the parameters that it trains beside them. Raises StageError for names that match nothing."""
    peft = import_peft()
    parameters = dict(model.named_parameters())
    targets = None
    if stage.targets == "all-linear":
        targets = [name for name, _ in linear_layers(model)]
        if not targets:
            raise StageError(f"adapter.lora: {type(model).__name__} has no linear layers")
    config = peft_config(stage, targets)
    config.init_lora_weights = False  # peft's values would be overwritten
    try:
        with quiet(), uninitialised():
            peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise StageError(f"adapter.lora: {error}", hint=_linear_hint(model)) from error
    found = layers(model)
    _refuse_unmatched_targets(stage, model, found)
    _train_also(stage, parameters, {layer.weight for layer in found})
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            # It would follow a dtype that the strategy is about to change.
            module.cast_input_dtype_enabled = False


def _train_also(
    stage: Lora, parameters: Mapping[str, nn.Parameter], updated: Collection[str]
) -> None:
    """Freeze the model's own `parameters` except those that the stage trains as a whole."""
    for name, parameter in parameters.items():
        wanted = any(fnmatchcase(name, one) for one in stage.train_also)
        if wanted and not parameter.is_floating_point():
            raise StageError(f"train_also: {name} is in 4 bits, which cannot be trained")
        if wanted and name in updated:
            raise StageError(
                f"train_also: {name} is trained through its update",
                hint="leave the layer out of `targets` to train its weight as a whole",
            )
        parameter.requires_grad_(wanted)
    for pattern in stage.train_also:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            raise StageError(
                f"train_also: {pattern!r} matches no parameter of the model",
                hint="they are called " + ", ".join(sorted(parameters)[-3:]) + ", ...",
            )


def layers(model: nn.Module) -> list[Layer]:
    """The layers of `model` that have an update. Raises StageError for kinds that cannot be
    merged."""
    lora = import_peft().tuners.lora
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, lora.LoraLayer):
            continue
        if not isinstance(module, lora.Linear):
            kind = type(module.get_base_layer()).__name__
            raise StageError(
                f"adapter.lora: {name} is of class {kind}, which is no linear layer",
                hint=_linear_hint(model),
            )
        layer = Layer(
            name=name,
            rank=int(module.r[ADAPTER]),
            scaling=float(module.scaling[ADAPTER]),
            transposed=bool(module.fan_in_fan_out),
            inputs=int(module.in_features),
            outputs=int(module.out_features),
            dora=bool(module.use_dora.get(ADAPTER)),
        )
        if layer.transposed and layer.dora:
            raise StageError(
                f"adapter.lora: {name} keeps its weight transposed, which DoRA cannot merge",
                hint="set dora: false",
            )
        found.append(layer)
    return found


def _refuse_unmatched_targets(stage: Lora, model: nn.Module, found: Sequence[Layer]) -> None:
    for target in () if isinstance(stage.targets, str) else stage.targets:
        if not any(f".{layer.name}".endswith(f".{target}") for layer in found):
            raise StageError(
                f"adapter.lora: no linear layer's name ends in {target!r}",
                hint=_linear_hint(model),
            )


def _linear_hint(model: nn.Module) -> str:
    """A hint with the last parts of linear layers' names, also of layers that have updates."""
    ends = {
        name.removesuffix(".base_layer").rpartition(".")[2]
        for name, module in model.named_modules()
        if is_linear(module) and "lora_" not in name
    }
    return "linear layers are called " + ", ".join(sorted(ends)[:SHOWN])


def peft_config(stage: Lora, targets: Sequence[str] | None = None) -> Any:
    """The stage as peft's configuration; `targets` in place of its own."""
    wanted = targets or (stage.targets if isinstance(stage.targets, str) else list(stage.targets))
    return import_peft().LoraConfig(
        task_type="CAUSAL_LM",
        r=stage.rank,
        lora_alpha=stage.alpha,
        lora_dropout=stage.dropout,
        target_modules=wanted,
        use_rslora=stage.scaling == "rslora",
        use_dora=stage.dora,
    )


def save_config(
    stage: Lora, folder: Path, model: nn.Module, *, base: str | None, revision: str | None
) -> None:
    """Write adapter_config.json; `model` has its adapter, `base` is the folder or hub id that it
    was loaded from. Raises StageError when parameters were trained that peft cannot keep in an
    adapter."""
    found = layers(model)
    config = peft_config(stage, _short_names(model, found))
    config.base_model_name_or_path, config.revision = base, revision
    config.inference_mode = True
    config.fan_in_fan_out = any(layer.transposed for layer in found)
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    updates = {name for layer in found for name in layer.shapes}
    config.modules_to_save = _whole_modules(model, trained - updates) or None
    config.save_pretrained(str(folder))


def _short_names(model: nn.Module, layers: Sequence[Layer]) -> list[str]:
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
        parameters = model.get_submodule(owner).named_parameters(recurse=False)
        own = {f"{owner}.{leaf}" for leaf, _ in parameters}
        if own - set(names) or own & shared:
            raise StageError(
                f"{owner}: an adapter cannot express training in part or of a shared weight",
                hint="export.safetensors merges it into the model",
            )
    return owners
