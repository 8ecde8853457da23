"""Layers that do not divide as a plan asks for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn

from pipeline import StageError
from stages.wrap.tensor.layers import COLUMNS, ROWS, heads_of, layer_sizes


def check_layers(
    model: nn.Module, styles: Mapping[str, str], size: int, shared: Mapping[str, int]
) -> None:
    """Raise StageError, naming the layer, for one that does not divide among `size` ranks in its
    style; `shared` layers have fewer heads than ranks."""
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, style in styles.items():
        if name in parameters:
            _check_parameter(name, parameters[name], style, size)
        elif style == "moe_tp_experts" and any(
            True for child in modules[name].children() for _ in child.parameters()
        ):
            raise StageError(
                f"{name}: updates of experts are not divided by tensor_parallel",
                hint="leave experts out of the adapter's targets",
            )
        elif style == "embedding_rowwise" and not isinstance(modules[name], nn.Embedding):
            raise StageError(f"{name}: {style} is for embeddings, this is {_kind(modules[name])}")
        elif style in COLUMNS or style in ROWS:
            _check_linear(model, name, style, size, shared)


def _kind(module: nn.Module) -> str:
    return f"a {type(module).__name__}"


def _check_parameter(name: str, parameter: nn.Parameter, style: str, size: int) -> None:
    if style not in COLUMNS and style not in ROWS:
        return
    dim = parameter.shape[-1 if style in ROWS or parameter.ndim < 2 else -2]
    parts = size * (2 if style.startswith("packed") else 1)
    if dim % parts:
        raise StageError(f"{name}: {dim} do not divide into {parts} parts")


def _check_linear(
    model: nn.Module, name: str, style: str, size: int, shared: Mapping[str, int]
) -> None:
    module = model.get_submodule(name)
    sizes = layer_sizes(module)
    if sizes is None:
        raise StageError(f"{name}: {style} is for linear layers, this is {_kind(module)}")
    if any(".lora_magnitude_vector." in f".{key}." for key, _ in module.named_parameters()):
        raise StageError(f"{name}: DoRA needs whole rows of the weight; set dora: false")
    inputs, outputs = sizes
    parts = size * (2 if style.startswith("packed") else 1)
    head = getattr(model, "get_output_embeddings", lambda: None)() is module
    divided, what = (outputs, "outputs") if style in COLUMNS else (inputs, "inputs")
    # Where a divided layer takes up what another gives, parts may differ in size.
    uneven = style in ("colwise", "rowwise") or head or name in shared
    if divided % parts and not uneven:
        raise StageError(f"{name}: {divided} {what} do not divide into {parts} parts")
    heads = heads_of(model, name) if style == "colwise" else None
    if heads and heads % size and name not in shared:
        raise StageError(f"{name}: {heads} attention heads do not divide among {size} ranks")


def check_ties(model: nn.Module, placements: Mapping[str, Any]) -> None:
    """Raise StageError for tied weights whose placements differ."""
    tied: dict[nn.Parameter, dict[str, Any]] = defaultdict(dict)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied[parameter][name] = placements[name]
    for found in tied.values():
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{name} {placement}" for name, placement in found.items())
            raise StageError(f"tied weights would be placed differently: {listed}")
