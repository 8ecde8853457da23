"""Linear layers with updates, made by peft, and what is known of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from pipeline.errors import StageError
from stages.adapter.compat import ADAPTER, import_peft, quiet, uninitialised
from stages.model.block_changes import is_linear, linear_layers

if TYPE_CHECKING:
    from torch import nn

    from stages.adapter.lora import Lora

SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A linear layer with an update."""

    name: str
    """Of the module, as in the model without updates."""
    rank: int
    scaling: float
    transposed: bool
    """Whether its weight is (inputs, outputs), as GPT-2's are."""
    inputs: int
    outputs: int
    dora: bool

    @property
    def down(self) -> str:
        """The tensor that is called A, shape (rank, inputs)."""
        return f"{self.name}.lora_A.{ADAPTER}.weight"

    @property
    def up(self) -> str:
        """The tensor that is called B, shape (outputs, rank)."""
        return f"{self.name}.lora_B.{ADAPTER}.weight"

    @property
    def magnitude(self) -> str:
        """With DoRA: the length of each row, shape (outputs,)."""
        return f"{self.name}.lora_magnitude_vector.{ADAPTER}.weight"

    @property
    def weight(self) -> str:
        """The weight that the update is for, in the model without updates."""
        return f"{self.name}.weight"


def peft_config(stage: Lora, targets: Sequence[str] | None = None) -> Any:
    """The stage as peft's configuration; `targets` in place of its own."""
    peft = import_peft()
    wanted = targets or (stage.targets if isinstance(stage.targets, str) else list(stage.targets))
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=stage.rank,
        lora_alpha=stage.alpha,
        lora_dropout=stage.dropout,
        target_modules=wanted,
        use_rslora=stage.scaling == "rslora",
        use_dora=stage.dora,
    )


def inject(stage: Lora, model: nn.Module) -> None:
    """Put updates into the layers of `model` that the stage names, and freeze everything else but
    what it trains beside them. Raises StageError for names that the model has not."""
    peft = import_peft()
    parameters = dict(model.named_parameters())
    every = stage.targets == "all-linear"
    config = peft_config(stage, _every_linear_layer(model) if every else None)
    config.init_lora_weights = False  # what is drawn here is overwritten
    try:
        with quiet(), uninitialised():
            peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise StageError(f"adapter.lora: {error}", hint=_linear_hint(model)) from error
    _refuse_idle(stage, model)
    updated = {layer.weight for layer in layers(model)}
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
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            # It would follow a dtype that the strategy is about to change.
            module.cast_input_dtype_enabled = False


def _every_linear_layer(model: nn.Module) -> list[str]:
    found = [name for name, _ in linear_layers(model)]
    if not found:
        raise StageError(f"adapter.lora: {type(model).__name__} has no linear layers")
    return found


def layers(model: nn.Module) -> list[Layer]:
    """What of `model` has an update. Raises StageError for kinds that cannot be merged."""
    peft = import_peft()
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, peft.tuners.lora.LoraLayer):
            continue
        if not isinstance(module, peft.tuners.lora.Linear):
            raise StageError(
                f"adapter.lora: {name} is a {type(module.get_base_layer()).__name__}, "
                "which is no linear layer",
                hint=_linear_hint(model),
            )
        transposed = bool(module.fan_in_fan_out)
        dora = bool(module.use_dora.get(ADAPTER))
        if transposed and dora:
            raise StageError(
                f"adapter.lora: {name} keeps its weight transposed, which DoRA cannot merge",
                hint="set dora: false",
            )
        found.append(
            Layer(
                name=name,
                rank=int(module.r[ADAPTER]),
                scaling=float(module.scaling[ADAPTER]),
                transposed=transposed,
                inputs=int(module.in_features),
                outputs=int(module.out_features),
                dora=dora,
            )
        )
    return found


def bound(layer: Layer) -> float:
    """A is drawn from [-bound, bound], B is zero: peft's rule, which is torch's for linear layers
    (He et al. 2015, with a slope of sqrt(5))."""
    return 1 / math.sqrt(layer.inputs)


def _refuse_idle(stage: Lora, model: nn.Module) -> None:
    if isinstance(stage.targets, str):
        return
    names = [layer.name for layer in layers(model)]
    for target in stage.targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise StageError(
                f"adapter.lora: no linear layer's name ends in {target!r}",
                hint=_linear_hint(model),
            )


def _linear_hint(model: nn.Module) -> str:
    """Ends of the names of linear layers, also of those that have updates already."""
    ends = {
        name.removesuffix(".base_layer").rpartition(".")[2]
        for name, module in model.named_modules()
        if is_linear(module) and "lora_" not in name
    }
    return "linear layers are called " + ", ".join(sorted(ends)[:SHOWN])
