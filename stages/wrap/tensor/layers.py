"""Layers as plans of tensor parallelism see them: styles, sizes, heads, and which do not divide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, get_args

from torch import nn

from pipeline import StageError
from stages.wrap.axes import Style

COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")
SUMMED = "replicated_with_grad_allreduce"
STYLES = (*get_args(Style), "colwise_rep", "rowwise_rep")
HEAD_SIZES = ("head_dim", "head_size")
"""Attributes under which attention modules keep the width of a head."""


def transposed(module: nn.Module) -> bool:
    """Whether the weight is (inputs, outputs), as GPT-2's layers keep it."""
    return type(module).__name__ == "Conv1D"


def layer_sizes(module: Any) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer, with or without an update; None for other modules."""
    if transposed(module):
        inputs, outputs = module.weight.shape
        return inputs, outputs
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features), int(module.out_features)
    return None


def shared_heads(model: nn.Module, styles: Mapping[str, str], size: int) -> dict[str, int]:
    """Key and value layers with so few heads that ranks share one."""
    found = {}
    for name, style in styles.items():
        heads = heads_of(model, name) if style == "colwise" else None
        if heads and heads < size and size % heads == 0 and name.endswith(("k_proj", "v_proj")):
            found[name] = heads
    return found


def heads_of(model: nn.Module, name: str) -> int | None:
    """Number of attention heads that a layer computes; None for other layers."""
    owner, _, leaf = name.rpartition(".")
    parent = model.get_submodule(owner)
    width = next((getattr(parent, key) for key in HEAD_SIZES if hasattr(parent, key)), None)
    outputs = getattr(getattr(parent, leaf), "out_features", None)  # a parameter has none
    return None if width is None or outputs is None else int(outputs) // int(width)


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
