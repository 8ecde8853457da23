"""Which layers of a model are divided among tensor-parallel ranks, and how: found and checked on
the meta device, without processes.

A plan maps names of modules or parameters to styles; in a name, `*` stands for one part between
dots, such as a layer's number. Most architectures bring a plan, a recipe may add to it. If several
entries match a name, the last counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pipeline import StageError
from stages.wrap.pipeline.split import Absent
from stages.wrap.tensor.compat import own_plan, sharded_dim
from stages.wrap.tensor.layers import (
    COLUMNS,
    ROWS,
    STYLES,
    SUMMED,
    check_layers,
    check_ties,
    layer_sizes,
    shared_heads,
)
from stages.wrap.tensor.placements import Owner, owners_of, placements_of


@dataclass(frozen=True, kw_only=True)
class Region:
    """A child of a block between whose input and output activations may be sharded by features."""

    name: str
    block: str
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
    head = names.get(getattr(model, "get_output_embeddings", lambda: None)())
    if sequence and not block_names:
        raise StageError("sequence: the model does not say which modules are its blocks")
    owners = owners_of(model, styles)
    shared = shared_heads(model, styles, size)
    check_layers(model, styles, size, shared)
    placements = placements_of(model, owners, shared)
    check_ties(model, placements)
    regions = {r.name: r for r in _regions(model, block_names, styles, owners)}
    return TensorPlan(
        size=size,
        sequence=sequence,
        styles=styles,
        placements=placements,
        summed=frozenset(_summed(model, owners, placements, block_names, regions, sequence)),
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


def _regions(
    model: nn.Module,
    blocks: Sequence[str],
    styles: Mapping[str, str],
    owners: Mapping[str, Owner],
) -> Iterator[Region]:
    for block in blocks:
        for child, module in model.get_submodule(block).named_children():
            name = f"{block}.{child}"
            inside = {n: s for n, s in styles.items() if n == name or n.startswith(f"{name}.")}
            divides = any(style not in ("replicate", SUMMED) for style in inside.values())
            # A norm, a dropout or a linear layer treats each token by itself, so it may be given a
            # part of the sequence.
            if not divides and not any(True for _ in module.children()):
                continue
            _check_region(name, inside)
            parameters = [f"{name}.{n}" for n, _ in module.named_parameters(remove_duplicate=False)]
            layers = (*COLUMNS, *ROWS, SUMMED)
            special = any(style not in layers for style in inside.values())
            bare = any(owners[n].entry == n for n in parameters if n in owners)
            whole = all(n in owners for n in parameters)
            plain = divides and not special and not bare and whole and _paired(model, inside)
            yield Region(name=name, block=block, plain=plain)


def _paired(model: nn.Module, inside: Mapping[str, str]) -> bool:
    """Whether every column layer of a region takes the region's own input, and a row layer follows.
    Otherwise one may take what another gives, and has to sum the gradients of its inputs itself."""
    columns = [n for n, style in inside.items() if style in COLUMNS]
    if not any(inside[n] == "colwise_gather_output" for n in columns):
        return True
    sizes = [layer_sizes(model.get_submodule(n)) for n in columns]
    widths = {None if one is None else one[0] for one in sizes}
    return len(widths) == 1 and any(style in ROWS for style in inside.values())


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
    owners: Mapping[str, Owner],
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
