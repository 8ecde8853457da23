"""Which layers of a model are divided among tensor-parallel ranks, and how: found and checked on
the meta device, without processes.

A plan maps names of modules or parameters to styles; in a name, `*` stands for one part between
dots, such as a layer's number. Most architectures bring a plan, a recipe may add to it. If several
entries match a name, the last counts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate

from pipeline import StageError
from stages.wrap.pipeline.split import Absent
from stages.wrap.tensor.layers import (
    COLUMNS,
    ROWS,
    STYLES,
    SUMMED,
    check_layers,
    innermost,
    layer_sizes,
    placement_of,
    shared_heads,
)


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
    blocks: Sequence[str]
    regions: Sequence[Region]
    head: str | None
    """The output layer, if it is sharded by the vocabulary."""
    shared_heads: Mapping[str, int]
    """Key and value layers with fewer heads than ranks -> number of heads."""


def region_of(name: str, regions: Sequence[Region]) -> Region | None:
    """The region that a module or parameter is, or is in."""
    return next((one for one in regions if f"{name}.".startswith(f"{one.name}.")), None)


def resolve(
    model: nn.Module, blocks: Sequence[nn.Module], *,
    size: int, patterns: Mapping[str, str] | None = None, sequence: bool = False,
) -> TensorPlan:  # fmt: skip
    """The architecture's plan with a recipe's `patterns` added, for `size` ranks.

    Raises StageError for an unknown style, a pattern of the recipe that matches nothing (in a stage
    of a pipeline, it may), sizes or heads that do not divide, and layers whose parts nothing takes
    up.
    """
    styles = _styles(model, getattr(model, "tp_plan", None) or {}, patterns or {})
    names = {module: name for name, module in model.named_modules()}
    block_names = [names[block] for block in blocks]
    head = names.get(getattr(model, "get_output_embeddings", lambda: None)())
    if sequence and not block_names:
        raise StageError("sequence: the model does not say which modules are its blocks")
    shared = shared_heads(model, styles, size)
    check_layers(model, styles, size, shared)
    entries, placements = dict[str, str](), dict[str, Any]()
    tied: dict[nn.Parameter, dict[str, Any]] = defaultdict(dict)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        entry, placements[name] = innermost(name, styles), Replicate()
        entries[name] = entry
        if entry and entry not in shared:
            module = model.get_submodule(name.rpartition(".")[0])
            placements[name] = placement_of(name, parameter, styles[entry], module)
        tied[parameter][name] = placements[name]
    for found in tied.values():
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{name} {placement}" for name, placement in found.items())
            raise StageError(f"tied weights would be placed differently: {listed}")
    regions = [*_regions(model, block_names, styles, entries)]
    summed = []
    for name in (name for name, placement in placements.items() if placement.is_replicate()):
        used_in_parts = styles.get(entries[name]) in (*COLUMNS, *ROWS, SUMMED)
        if not entries[name] and sequence and region_of(name, regions) is None:
            # A norm on this rank's part of the sequence.
            used_in_parts = any(name.startswith(f"{block}.") for block in block_names)
        if used_in_parts:
            summed.append(name)
    return TensorPlan(
        size=size,
        sequence=sequence,
        styles=styles,
        placements=placements,
        summed=frozenset(summed),
        blocks=block_names,
        regions=regions,
        head=head if styles.get(head or "") in COLUMNS else None,
        shared_heads=shared,
    )


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
