"""Which layers of a model are divided among tensor-parallel ranks, and how: found and checked on
the meta device, without processes.

A plan maps names of modules or parameters to styles; in a name, `*` stands for one part between
dots, such as a layer's number. Most architectures bring a plan, a recipe may add to it. Of several
entries that match a name the last counts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from pipeline import StageError
from stages.wrap.axes import Style
from stages.wrap.pipeline.split import Entrance, Left
from stages.wrap.tensor.compat import own_plan, packed, sharded_dim

COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")
SUMMED = "replicated_with_grad_allreduce"
STYLES = (*get_args(Style), "colwise_rep", "rowwise_rep")
HEAD_SIZES = ("head_dim", "head_size")
"""Attributes under which attention modules keep the width of a head."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """A child of a block between whose input and output activations may be sharded by features."""

    name: str
    plain: bool
    """Whether all that reads its input is sharded by columns, so that the gradient of the input is
    a summand; otherwise each such layer sums the gradient of its own input."""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """A plan resolved for one model."""

    size: int
    sequence: bool
    """Whether activations between a block's layers are sharded along the sequence."""
    styles: Mapping[str, str]
    """Name of each module, or bare parameter, that is in the plan -> style."""
    placements: Mapping[str, Any]
    """Name of every parameter -> placement on the tensor-parallel axis, tied ones by every name."""
    summed: frozenset[str]
    """Parameters that each rank uses for a part of the activations: gradients are summands."""
    blocks: tuple[str, ...]
    regions: Mapping[str, Region]
    head: str | None
    """The output layer, if it is sharded by the vocabulary."""
    shared_heads: Mapping[str, int] = field(default_factory=dict)
    """Key and value layers with fewer heads than ranks -> number of heads."""


def resolve(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    size: int,
    patterns: Mapping[str, str] | None = None,
    sequence: bool = False,
) -> TensorPlan:
    """The architecture's plan with a recipe's `patterns` added, for `size` ranks.

    Raises StageError for an unknown style, a pattern of the recipe that matches nothing (in a stage
    of a pipeline, it may), sizes or heads that do not divide, and layers whose parts nothing takes
    up.
    """
    styles = _styles(model, own_plan(model), patterns or {})
    names = {module: name for name, module in model.named_modules()}
    block_names = tuple(names[block] for block in blocks)
    head = _head(model, names, styles)
    if sequence and not block_names:
        raise StageError("sequence: the model does not say which modules are its blocks")
    owners = _owners(model, styles)
    shared = _shared_heads(model, styles, size)
    _check_layers(model, styles, size, shared)
    placements = _placements(model, owners, shared)
    _check_ties(model, placements)
    regions = {r.name: r for r in _regions(model, block_names, styles, owners)}
    return TensorPlan(
        size=size,
        sequence=sequence,
        styles=styles,
        placements=placements,
        summed=frozenset(_summed(model, owners, placements, block_names, regions, sequence)),
        blocks=block_names,
        regions=regions,
        head=head,
        shared_heads=shared,
    )


def matches(pattern: str, name: str) -> bool:
    """Whether `name` is `pattern`, in which `*` stands for one part between dots."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def _styles(
    model: nn.Module, own: Mapping[str, str], patterns: Mapping[str, str]
) -> dict[str, str]:
    absent = [name for name, one in model.named_modules() if isinstance(one, Left | Entrance)]
    names = [name for name, _ in model.named_modules() if name not in absent]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, str] = {}
    for pattern, style in [*own.items(), *patterns.items()]:
        if style not in STYLES:
            raise StageError(f"{pattern}: unknown style {style!r}; known are {', '.join(STYLES)}")
        matched = [name for name in names if matches(pattern, name)]
        if not matched and pattern in patterns and not absent:
            raise StageError(f"{pattern!r} matches no module or parameter {_ends(names, pattern)}")
        found.update(dict.fromkeys(matched, style))
    if not any(style not in ("replicate", SUMMED) for style in found.values()):
        raise StageError(
            f"tensor_parallel: {type(model).__name__} brings no plan",
            hint="name its layers in tensor_parallel.plan",
        )
    return {name: found[name] for name in names if name in found}


def _ends(names: Sequence[str], pattern: str) -> str:
    last = pattern.rpartition(".")[2]
    like = [name for name in names if name.rpartition(".")[2] == last] or names[1:]
    return f"of the model, which has {', '.join(like[:3])}, ..."


def _head(model: Any, names: Mapping[nn.Module, str], styles: Mapping[str, str]) -> str | None:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    name = names.get(head) if head is not None else None
    return name if styles.get(name or "") in COLUMNS else None


@dataclass(frozen=True)
class _Owner:
    """The entry of a plan that says how a parameter is placed."""

    entry: str
    style: str
    module: nn.Module
    """The parameter's own module."""


def _owners(model: nn.Module, styles: Mapping[str, str]) -> dict[str, _Owner]:
    """Name of each parameter in the plan -> its entry, the innermost if there are several."""
    found = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        entry = name
        while entry and entry not in styles:
            entry = entry.rpartition(".")[0]
        if entry:
            module = model.get_submodule(name.rpartition(".")[0])
            found[name] = _Owner(entry, styles[entry], module)
    return found


def transposed(module: nn.Module) -> bool:
    """Whether the weight is (inputs, outputs), as GPT-2's layers keep it."""
    return type(module).__name__ == "Conv1D"


def _placements(
    model: nn.Module, owners: Mapping[str, _Owner], shared: Mapping[str, int]
) -> dict[str, Any]:
    return {
        name: Replicate()
        if name not in owners or owners[name].entry in shared
        else _placement(name, parameter, owners[name])
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _placement(name: str, parameter: nn.Parameter, owner: _Owner) -> Any:
    """Of a layer with an update W + B A, the rows of W and B are outputs, the columns of W and A
    inputs."""
    down, up = ".lora_A." in name, ".lora_B." in name
    outputs = parameter.ndim - 2 if parameter.ndim > 1 else 0
    inputs = parameter.ndim - 1
    if parameter.ndim > 1 and transposed(owner.module):
        outputs, inputs = inputs, outputs
    if owner.style == "embedding_rowwise":
        return Shard(0)
    if owner.style == "packed_colwise" and not down:
        return packed(outputs, 2)
    if owner.style in COLUMNS and not down:
        return Shard(outputs)
    if owner.style in ROWS and not up and parameter.ndim > 1:
        return packed(inputs, 2) if owner.style == "packed_rowwise" else Shard(inputs)
    return Replicate()


def _shared_heads(model: nn.Module, styles: Mapping[str, str], size: int) -> dict[str, int]:
    """Key and value layers with so few heads that ranks share one."""
    found = {}
    for name, style in styles.items():
        heads = _heads(model, name) if style == "colwise" else None
        if heads and heads < size and size % heads == 0 and name.endswith(("k_proj", "v_proj")):
            found[name] = heads
    return found


def _heads(model: nn.Module, name: str) -> int | None:
    """Number of attention heads that a layer computes; None for other layers."""
    parent = model.get_submodule(name.rpartition(".")[0])
    width = next((getattr(parent, key) for key in HEAD_SIZES if hasattr(parent, key)), None)
    outputs = getattr(model.get_submodule(name), "out_features", None)
    return None if width is None or outputs is None else int(outputs) // int(width)


def _check_layers(
    model: nn.Module, styles: Mapping[str, str], size: int, shared: Mapping[str, int]
) -> None:
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, style in styles.items():
        if name in parameters:
            _check_parameter(name, parameters[name], style, size)
        elif style == "moe_tp_experts" and _has_updates(modules[name]):
            raise StageError(
                f"{name}: updates of experts are not divided by tensor_parallel",
                hint="leave experts out of the adapter's targets",
            )
        elif style == "embedding_rowwise" and not isinstance(modules[name], nn.Embedding):
            raise StageError(f"{name}: {style} is for embeddings, this is {_kind(modules[name])}")
        elif style in COLUMNS or style in ROWS:
            _check_linear(model, name, style, size, shared)


def _has_updates(experts: nn.Module) -> bool:
    inside = (one for child in experts.children() for one in child.parameters())
    return any(True for _ in inside)


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
    heads = _heads(model, name) if style == "colwise" else None
    if heads and heads % size and name not in shared:
        raise StageError(f"{name}: {heads} attention heads do not divide among {size} ranks")


def layer_sizes(module: Any) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer, with or without an update; None for other modules."""
    if transposed(module):
        inputs, outputs = module.weight.shape
        return inputs, outputs
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features), int(module.out_features)
    return None


def _check_ties(model: nn.Module, placements: Mapping[str, Any]) -> None:
    tied: dict[nn.Parameter, dict[str, Any]] = defaultdict(dict)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied[parameter][name] = placements[name]
    for found in tied.values():
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{name} {placement}" for name, placement in found.items())
            raise StageError(f"tied weights would be placed differently: {listed}")


def _regions(
    model: nn.Module,
    blocks: Sequence[str],
    styles: Mapping[str, str],
    owners: Mapping[str, _Owner],
) -> Iterator[Region]:
    for block in blocks:
        for child, module in model.get_submodule(block).named_children():
            name = f"{block}.{child}"
            inside = {n: s for n, s in styles.items() if n == name or n.startswith(f"{name}.")}
            divides = any(style not in ("replicate", SUMMED) for style in inside.values())
            if not divides and _by_token(module):
                continue
            _check_region(name, inside)
            parameters = [f"{name}.{n}" for n, _ in module.named_parameters(remove_duplicate=False)]
            layers = (*COLUMNS, *ROWS, SUMMED)
            special = any(style not in layers for style in inside.values())
            bare = any(owners[n].entry == n for n in parameters if n in owners)
            plain = divides and not special and not bare and all(n in owners for n in parameters)
            yield Region(name=name, plain=plain)


def _by_token(module: nn.Module) -> bool:
    """Whether `module` is no more than a norm, a dropout or a linear layer: it treats each token by
    itself, so it may be given a part of the sequence."""
    return not any(True for _ in module.children())


def _check_region(name: str, inside: Mapping[str, str]) -> None:
    if name in inside:  # the layer is the block's own child, and so are those around it
        return
    columns = [n for n, style in inside.items() if style in ("colwise", "packed_colwise")]
    rows = [n for n, style in inside.items() if style in ("rowwise", "packed_rowwise")]
    if bool(columns) != bool(rows):
        one, lacking = (columns[0], "rowwise") if columns else (rows[0], "colwise")
        raise StageError(f"{one} is {inside[one]}, but nothing in {name} is {lacking}")


def _summed(
    model: nn.Module,
    owners: Mapping[str, _Owner],
    placements: Mapping[str, Any],
    blocks: Sequence[str],
    regions: Mapping[str, Region],
    sequence: bool,
) -> Iterator[str]:
    for name in placements:
        if sharded_dim(placements[name]) is not None:
            continue
        block = next((b for b in blocks if name.startswith(f"{b}.")), None)
        region = next((r for r in regions.values() if name.startswith(f"{r.name}.")), None)
        owner = owners.get(name)
        if owner is None:
            if sequence and block is not None and region is None:
                yield name  # a norm on this rank's part of the sequence
        elif owner.style in ROWS and name.endswith(".bias"):
            if sequence and region is not None and region.plain:
                yield name  # added behind the reduce-scatter
        elif owner.style in COLUMNS or owner.style in ROWS or owner.style == SUMMED:
            yield name
