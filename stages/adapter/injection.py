"""Updates of a model's layers and experts, and a report of matrices without one."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from pipeline import StageError
from pipeline.utils import closest
from stages.adapter.compat import (
    ADAPTER,
    Layer,
    import_peft,
    quiet,
    targets_as_named,
    uninitialised,
)
from stages.adapter.experts import LowRank, add_updates, stacked_weights, updated_experts
from stages.adapter.peft_files import peft_config
from stages.adapter.settings import LoraSettings
from stages.model.block_changes import is_linear, linear_layers
from stages.model.declared import logical_numel, matches, refuse_idle

if TYPE_CHECKING:
    from torch import nn

SHOWN = 8


def inject(stage: LoraSettings, model: nn.Module) -> None:
    """Put updates into the layers of `model` that the stage names, and freeze everything else but
    the parameters that it trains as a whole. Raises StageError for names that match nothing."""
    parameters = dict(model.named_parameters())
    for name, one in parameters.items():
        if one.is_floating_point() and not one.requires_grad and matches(name, stage.train_also):
            raise StageError(
                f"train_also: {name} is frozen by the model slot",
                hint="leave it out of one of them: `train_also` here, or `frozen` there",
            )
    experts = _chosen_experts(stage, model)
    if stage.targets:
        _inject_linear(stage, model)
    root = stage.rank if stage.scaling == "standard" else math.sqrt(stage.rank)
    add_updates(model, experts, LowRank(stage.rank, stage.alpha / root, stage.dropout))
    found = layers(model)
    for target in () if isinstance(stage.targets, str) else stage.targets:
        if not any(layer.experts is None and _ends_in(layer.name, target) for layer in found):
            raise StageError(
                f"adapter.lora: no linear layer's name ends in {target!r}",
                hint=_linear_hint(model, target),
            )
    updated = {layer.weight for layer in found}
    for name, parameter in parameters.items():
        wanted = matches(name, stage.train_also)
        if wanted and not parameter.is_floating_point():
            raise StageError(f"train_also: {name} is in 4 bits, which cannot be trained")
        if wanted and name in updated:
            raise StageError(
                f"train_also: {name} is trained through its update",
                hint="leave the layer out of `targets` to train its weight as a whole",
            )
        parameter.requires_grad_(wanted)
    refuse_idle("train_also", stage.train_also, parameters, "parameter of the model")


def _inject_linear(stage: LoraSettings, model: nn.Module) -> None:
    peft = import_peft()
    targets = None
    if stage.targets == "all-linear":
        targets = [name for name, _ in linear_layers(model)]
        if not targets:
            raise StageError(f"adapter.lora: {type(model).__name__} has no linear layers")
    config = peft_config(stage, targets)
    config.init_lora_weights = False  # peft's values would be overwritten
    try:
        with quiet(), uninitialised(), targets_as_named():
            peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise StageError(f"adapter.lora: {error}", hint=_linear_hint(model)) from error
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            # It would follow a dtype that the strategy is about to change.
            module.cast_input_dtype_enabled = False


def _chosen_experts(stage: LoraSettings, model: nn.Module) -> Collection[str]:
    """Names of the stacked weights that get updates. Raises StageError for idle targets."""
    names = [name for name, _, _ in stacked_weights(model)]
    if stage.target_parameters is None:
        trained = () if stage.misses_experts else names
        return [name for name in trained if not matches(name, stage.train_also)]
    for target in stage.target_parameters:
        if not any(_ends_in(name, target) for name in names):
            ends = ", ".join(sorted({".".join(name.split(".")[-3:]) for name in names}))
            raise StageError(
                f"adapter.lora: no stacked weights of experts have a name that ends in {target!r}",
                hint=f"they are called {ends}" if ends else "leave out target_parameters",
            )
    return [name for name in names if any(_ends_in(name, end) for end in stage.target_parameters)]


def _ends_in(name: str, end: str) -> bool:
    """Whether the last parts of a name are `end`."""
    return f".{name}".endswith(f".{end}")


def _linear_hint(model: nn.Module, target: str = "") -> str:
    """A hint with the last parts of linear layers' names, also of layers that have updates."""
    ends = {
        name.removesuffix(".base_layer").rpartition(".")[2]
        for name, module in model.named_modules()
        if is_linear(module) and "lora_" not in name
    }
    near = closest(target.rpartition(".")[2], ends)
    asked = f"did you mean `{near}`? " if near else ""
    return f"{asked}linear layers are called " + ", ".join(sorted(ends)[:SHOWN])


def layers(model: nn.Module) -> list[Layer]:
    """Return the updated layers and stacked weights. Raises StageError for odd kinds."""
    lora = import_peft().tuners.lora
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, lora.LoraLayer):
            continue
        if not isinstance(module, lora.Linear):
            kind = type(module.get_base_layer()).__name__
            raise StageError(
                f"adapter.lora: {name} is of class {kind}, which is not a linear layer",
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
    return [*found, *updated_experts(model)]


def log_left_out(
    stage: LoraSettings, model: Any, layers: Sequence[Layer], log: logging.Logger
) -> None:
    """Warn of linear layers and stacked weights without an update, and say how to include them;
    mention routers, which are usually left as they are."""
    for kind, sizes in _left_out(model, layers).items():
        what = f"{sizes.total():,} parameters of {', '.join(sizes)}"
        if kind == "router":
            log.info("%s stay as they are; train_also trains them as a whole", what)
            continue
        ends = sorted({pattern.rpartition(".*.")[2] for pattern in sizes})
        whole = ", ".join(f"'*.{end}'" for end in ends)
        advice = f"train_also: [{whole}] trains them as a whole"
        if kind == "linear":
            names = ", ".join(end.removesuffix(".weight") for end in ends)
            advice = f"targets: all-linear includes them, or their names {names}"
        elif kind == "experts" and stage.dora:
            advice = f"DoRA has none for experts; {advice}"
        elif kind == "experts":
            advice = f"target_parameters: [{', '.join(ends)}] includes them"
        log.warning("%s get no update and stay as they are; %s", what, advice)


def _left_out(model: Any, layers: Sequence[Layer]) -> dict[str, Counter[str]]:
    """Kind -> names, without the numbers of blocks, of the matrices without an update and their
    elements. Embeddings, the head and biases do not count."""
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    updated = {layer.weight for layer in layers}
    experts = {name for name, _, _ in stacked_weights(model)}
    packed = logical_numel(model)
    found: dict[str, Counter[str]] = {}
    for owner, module in model.named_modules():
        if any(module is table for table in tables) or owner.endswith(".base_layer"):
            continue
        for leaf, weight in module.named_parameters(recurse=False):
            name, linear = f"{owner}.{leaf}", is_linear(module)
            if name in updated or weight.requires_grad or "bias" in leaf:
                continue
            if not linear and weight.ndim < 2:
                continue
            stacked = "experts" if name in experts else "stacked" if weight.ndim > 2 else "router"
            shown = re.sub(r"\.\d+\.", ".*.", f"{owner}.weight" if linear else name)
            sizes = found.setdefault("linear" if linear else stacked, Counter())
            sizes[shown] += packed.get(name) or weight.numel()
    return found
