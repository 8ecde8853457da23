"""Which layers of a model are divided among tensor-parallel ranks, and how: found and checked on
the meta device, without processes.

A plan maps names of modules or parameters to styles; in a name, `*` stands for one part between
dots, such as a layer's number. Most architectures bring a plan, a recipe may add to it. If several
entries match a name, the last counts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from pipeline import StageError
from stages.wrap.axes import Style, TensorParallel
from stages.wrap.pipeline_split import Absent
from stages.wrap.torch_compat import packed
from stages.wrap.types_compat import refuse_type

COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")
SUMMED = "replicated_with_grad_allreduce"
TRANSPOSED = "Conv1D"
"""Class of layers with a weight of (inputs, outputs), as GPT-2 has."""
STYLES = (*get_args(Style), "colwise_rep", "rowwise_rep")


@dataclass(frozen=True, kw_only=True)
class Region:
    """A child of a block between whose input and output activations may be sharded by features."""

    name: str
    block: str
    plain: bool
    """Whether all readers of its input are sharded by columns, so that the gradient of the input is
    a summand; otherwise each of them all-reduces its own input gradient."""
    divides: bool
    """Whether activations inside are sharded by features."""


def region_of(name: str, regions: Sequence[Region]) -> Region | None:
    """The region that a module or parameter is, or is in."""
    return next((one for one in regions if f"{name}.".startswith(f"{one.name}.")), None)


class TensorPlan:
    """The architecture's plan with a recipe's patterns added, for one model. Raises StageError for
    a type that does not divide, an unknown style, a pattern of the recipe that matches nothing (in
    a stage of a pipeline, it may), sizes or heads that do not divide, and layers whose parts
    nothing takes up."""

    def __init__(
        self, config: TensorParallel, model: nn.Module, blocks: Sequence[nn.Module]
    ) -> None:
        refuse_type("tensor_parallel", model.config)
        self.size, self.sequence = size, sequence = config.size, config.sequence
        self.styles = _styles(model, getattr(model, "tp_plan", None) or {}, config.plan)
        """Name of each module, or bare parameter, that is in the plan -> style."""
        names = {module: name for name, module in model.named_modules()}
        self.blocks = [names[block] for block in blocks]
        if sequence and not self.blocks:
            raise StageError("sequence: the model does not say which modules are its blocks")
        head = names.get(getattr(model, "get_output_embeddings", lambda: None)(), "")
        self.head = head if self.styles.get(head) in COLUMNS else None
        """The output layer, if it is sharded by the vocabulary."""
        keys = (name for name, style in self.styles.items() if style == "colwise")
        heads = {name: _heads(model, name) for name in keys if name.endswith(("k_proj", "v_proj"))}
        self.shared_heads = {
            name: n for name, n in heads.items() if n and n < size and not size % n
        }
        """Key and value layers with fewer heads than ranks -> number of heads."""
        check_layers(model, self.styles, size, {*self.shared_heads, head})
        self.placements: dict[str, Any] = {}
        """Name of every parameter -> placement on the tensor-parallel axis, tied ones by every
        name."""
        entries, tied = dict[str, str](), defaultdict[nn.Parameter, dict[str, Any]](dict)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            entry, placement = innermost(name, self.styles), Replicate()
            if entry and entry not in self.shared_heads:
                module = model.get_submodule(name.rpartition(".")[0])
                placement = placement_of(name, parameter, self.styles[entry], module)
            entries[name], tied[parameter][name] = entry, placement
            self.placements[name] = placement
        for found in tied.values():
            if len(set(found.values())) > 1:
                listed = ", ".join(f"{name} {placement}" for name, placement in found.items())
                raise StageError(f"tied weights would be placed differently: {listed}")
        self.regions = [*_regions(model, self.blocks, self.styles, entries)]
        self.summed = set[str]()
        """Parameters that each rank uses for a part of the activations: gradients are summands."""
        for name, entry in entries.items():
            if entry or not sequence:
                in_parts = self.styles.get(entry) in (*COLUMNS, *ROWS, SUMMED)
            else:  # a norm on this rank's part of the sequence
                inside = any(name.startswith(f"{block}.") for block in self.blocks)
                in_parts = inside and region_of(name, self.regions) is None
            if in_parts and self.placements[name].is_replicate():
                self.summed.add(name)


def matches(pattern: str, name: str) -> bool:
    """Whether `name` is `pattern`, in which `*` stands for one part between dots."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def _styles(
    model: nn.Module, own: Mapping[str, str], patterns: Mapping[str, str]
) -> dict[str, str]:
    absent = [name for name, one in model.named_modules() if isinstance(one, Absent)]
    names = [name for name, _ in model.named_modules() if name not in absent]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, str] = {}
    for pattern, style in [*own.items(), *patterns.items()]:
        if style not in STYLES:
            raise StageError(f"{pattern}: unknown style {style!r}; known are {', '.join(STYLES)}")
        matched = [name for name in names if matches(pattern, name)]
        if not matched and pattern in patterns and not absent:
            last = pattern.rpartition(".")[2]
            like = [name for name in names if name.rpartition(".")[2] == last] or names[1:]
            raise StageError(
                f"{pattern!r} matches no module or parameter of the model, which has "
                f"{', '.join(like[:3])}, ..."
            )
        found.update(dict.fromkeys(matched, style))
    if not any(style not in ("replicate", SUMMED) for style in found.values()):
        raise StageError(
            f"tensor_parallel: {type(model).__name__} brings no plan",
            hint="name its layers in tensor_parallel.plan",
        )
    return {name: found[name] for name in names if name in found}


def _regions(
    model: nn.Module, blocks: Sequence[str], styles: Mapping[str, str], entries: Mapping[str, str]
) -> Iterator[Region]:
    for block in blocks:
        for child, module in model.get_submodule(block).named_children():
            name = f"{block}.{child}"
            inside = {n: s for n, s in styles.items() if f"{n}.".startswith(f"{name}.")}
            divided = any(style not in ("replicate", SUMMED) for style in inside.values())
            # A norm, a dropout or a linear layer treats each token by itself, so it may be given a
            # part of the sequence.
            if not divided and not any(True for _ in module.children()):
                continue
            columns = [n for n, s in inside.items() if s in ("colwise", "packed_colwise")]
            rows = [n for n, s in inside.items() if s in ("rowwise", "packed_rowwise")]
            # A layer that is the block's own child passes its part to others around it.
            if name not in inside and bool(columns) != bool(rows):
                one, lacking = (columns[0], "rowwise") if columns else (rows[0], "colwise")
                raise StageError(f"{one} is {inside[one]}, but nothing in {name} is {lacking}")
            names = [f"{name}.{n}" for n, _ in module.named_parameters(remove_duplicate=False)]
            layers = all(style in (*COLUMNS, *ROWS, SUMMED) for style in inside.values())
            whole = all(entries[n] not in ("", n) for n in names)
            plain = divided and layers and whole
            if plain and "colwise_gather_output" in inside.values():
                # A layer may consume another's output, and must all-reduce its own input gradient,
                # unless all column layers take the region's own input, and a row layer follows.
                readers = (model.get_submodule(n) for n, s in inside.items() if s in COLUMNS)
                widths = {sizes and sizes[0] for sizes in map(layer_sizes, readers)}
                plain = len(widths) == 1 and any(style in ROWS for style in inside.values())
            divides = "colwise" in inside.values()
            yield Region(name=name, block=block, plain=plain, divides=divides)


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
    if parameter.ndim > 1 and type(module).__name__ == TRANSPOSED:
        outputs, inputs = inputs, outputs
    if style == "embedding_rowwise":
        return Shard(0)
    if style in COLUMNS and not down:
        return packed(outputs, 2) if style == "packed_colwise" else Shard(outputs)
    if style in ROWS and not up and parameter.ndim > 1:
        return packed(inputs, 2) if style == "packed_rowwise" else Shard(inputs)
    return Replicate()


def layer_sizes(module: Any) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer, with or without an update; None for other modules."""
    if type(module).__name__ == TRANSPOSED:
        inputs, outputs = module.weight.shape
        return inputs, outputs
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features), int(module.out_features)
    return None


def _heads(model: nn.Module, name: str) -> int | None:
    """Number of attention heads that a layer computes; None for other layers."""
    owner, _, leaf = name.rpartition(".")
    parent: Any = model.get_submodule(owner)
    width = getattr(parent, "head_dim", getattr(parent, "head_size", None))
    outputs = getattr(getattr(parent, leaf), "out_features", None)  # a parameter has none
    return None if width is None or outputs is None else int(outputs) // int(width)


def check_layers(
    model: nn.Module, styles: Mapping[str, str], size: int, uneven: Collection[str]
) -> None:
    """Raise StageError for a layer that does not divide among `size` ranks in its style; `uneven`
    ones, the head and those with fewer heads than ranks, may have parts of different sizes."""
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
            heads = _heads(model, name) if style == "colwise" and name not in uneven else None
            sizes = layer_sizes(module)
            if sizes is None:
                kind = type(module).__name__
                raise StageError(f"{name}: {style} is for linear layers, this is a {kind}")
            if any(".lora_magnitude_vector." in f".{key}." for key, _ in module.named_parameters()):
                raise StageError(f"{name}: DoRA needs whole rows of the weight; set dora: false")
            divided, what = (sizes[1], "outputs") if style in COLUMNS else (sizes[0], "inputs")
            # Parts of these may differ in size, as a divided layer consumes what another returns.
            if divided % parts and not (style in ("colwise", "rowwise") or name in uneven):
                raise StageError(f"{name}: {divided} {what} do not divide into {parts} parts")
            if heads and heads % size:
                message = f"{heads} attention heads do not divide among {size} ranks"
                raise StageError(f"{name}: {message}")
