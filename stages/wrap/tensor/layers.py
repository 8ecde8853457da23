"""Layers as plans of tensor parallelism see them: styles, sizes, heads, the placement of each
parameter, and what does not divide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from pipeline import StageError
from stages.wrap.axes import Style
from stages.wrap.torch_compat import packed

COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")
SUMMED = "replicated_with_grad_allreduce"
STYLES = (*get_args(Style), "colwise_rep", "rowwise_rep")


def innermost(name: str, styles: Mapping[str, str]) -> str:
    """The entry of the plan that a module or parameter is, or is in; empty if there is none."""
    while name and name not in styles:
        name = name.rpartition(".")[0]
    return name


def placement_of(name: str, parameter: nn.Parameter, style: str, module: nn.Module) -> Any:
    """Placement of a parameter of `module`. In a layer with an update W + B A, the rows of W and B
    are outputs, the columns of W and A inputs."""
    down, up = ".lora_A." in name, ".lora_B." in name
    outputs, inputs = max(parameter.ndim - 2, 0), parameter.ndim - 1
    if parameter.ndim > 1 and is_transposed(module):
        outputs, inputs = inputs, outputs
    if style == "embedding_rowwise":
        return Shard(0)
    if style in COLUMNS and not down:
        return packed(outputs, 2) if style == "packed_colwise" else Shard(outputs)
    if style in ROWS and not up and parameter.ndim > 1:
        return packed(inputs, 2) if style == "packed_rowwise" else Shard(inputs)
    return Replicate()


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is (inputs, outputs), as GPT-2's layers keep it."""
    return type(module).__name__ == "Conv1D"


def layer_sizes(module: Any) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer, with or without an update; None for other modules."""
    if is_transposed(module):
        inputs, outputs = module.weight.shape
        return inputs, outputs
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features), int(module.out_features)
    return None


def shared_heads(model: nn.Module, styles: Mapping[str, str], size: int) -> dict[str, int]:
    """Key and value layers with so few heads that ranks share one -> number of heads."""
    names = (name for name, style in styles.items() if style == "colwise")
    found = {name: _heads(model, name) for name in names if name.endswith(("k_proj", "v_proj"))}
    return {name: n for name, n in found.items() if n and n < size and size % n == 0}


def _heads(model: nn.Module, name: str) -> int | None:
    """Number of attention heads that a layer computes; None for other layers."""
    owner, _, leaf = name.rpartition(".")
    parent: Any = model.get_submodule(owner)
    width = getattr(parent, "head_dim", getattr(parent, "head_size", None))
    outputs = getattr(getattr(parent, leaf), "out_features", None)  # a parameter has none
    return None if width is None or outputs is None else int(outputs) // int(width)


def check_layers(
    model: nn.Module, styles: Mapping[str, str], size: int, shared: Mapping[str, int]
) -> None:
    """Raise StageError for a layer that does not divide among `size` ranks in its style; `shared`
    ones have fewer heads than ranks."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, style in styles.items():
        linear, parts = style in (*COLUMNS, *ROWS), size * (2 if style.startswith("packed") else 1)
        if name in parameters:
            shape = parameters[name].shape
            dim = shape[-1 if style in ROWS or len(shape) < 2 else -2]
            if linear and dim % parts:
                raise StageError(f"{name}: {dim} do not divide into {parts} parts")
            continue
        module = model.get_submodule(name)
        updated = any(True for child in module.children() for _ in child.parameters())
        if style == "moe_tp_experts" and updated:
            raise StageError(
                f"{name}: updates of experts are not divided by tensor_parallel",
                hint="leave experts out of the adapter's targets",
            )
        if style == "embedding_rowwise" and not isinstance(module, nn.Embedding):
            kind = type(module).__name__
            raise StageError(f"{name}: {style} is for embeddings, this is a {kind}")
        if linear:
            heads = _heads(model, name) if style == "colwise" and name not in shared else None
            head = getattr(model, "get_output_embeddings", lambda: None)() is module
            _check_linear(name, module, style, parts, uneven=head or name in shared)
            if heads and heads % size:
                message = f"{heads} attention heads do not divide among {size} ranks"
                raise StageError(f"{name}: {message}")


def _check_linear(name: str, module: nn.Module, style: str, parts: int, *, uneven: bool) -> None:
    sizes = layer_sizes(module)
    if sizes is None:
        kind = type(module).__name__
        raise StageError(f"{name}: {style} is for linear layers, this is a {kind}")
    if any(".lora_magnitude_vector." in f".{key}." for key, _ in module.named_parameters()):
        raise StageError(f"{name}: DoRA needs whole rows of the weight; set dora: false")
    divided, what = (sizes[1], "outputs") if style in COLUMNS else (sizes[0], "inputs")
    # Parts of these may differ in size, as a divided layer consumes what another returns.
    if divided % parts and not (style in ("colwise", "rowwise") or uneven):
        raise StageError(f"{name}: {divided} {what} do not divide into {parts} parts")
