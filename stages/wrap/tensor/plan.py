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


def region_of(name: str, regions: Sequence[Region]) -> Region | None:
    """The region that a module or parameter is, or is in."""
    return next((one for one in regions if f"{name}.".startswith(f"{one.name}.")), None)


class TensorPlan:
    """The architecture's plan with a recipe's `patterns` added, for one model and `size` ranks.

    Raises StageError for an unknown style, a pattern of the recipe that matches nothing (in a stage
    of a pipeline, it may), sizes or heads that do not divide, and layers whose parts nothing takes
    up.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], *,
        size: int, patterns: Mapping[str, str] | None = None, sequence: bool = False,
    ) -> None:  # fmt: skip
        self.size, self.sequence = size, sequence
        self.styles = _styles(model, getattr(model, "tp_plan", None) or {}, patterns or {})
        """Name of each module, or bare parameter, that is in the plan -> style."""
        names = {module: name for name, module in model.named_modules()}
        self.blocks = [names[block] for block in blocks]
        if sequence and not self.blocks:
            raise StageError("sequence: the model does not say which modules are its blocks")
        head = names.get(getattr(model, "get_output_embeddings", lambda: None)(), "")
        self.head = head if self.styles.get(head) in COLUMNS else None
        """The output layer, if it is sharded by the vocabulary."""
        self.shared_heads = shared_heads(model, self.styles, size)
        """Key and value layers with fewer heads than ranks -> number of heads."""
        check_layers(model, self.styles, size, self.shared_heads)
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
        self.summed = {name for name in self.placements if self._used_in_parts(name, entries[name])}
        """Parameters that each rank uses for a part of the activations: gradients are summands."""

    def _used_in_parts(self, name: str, entry: str) -> bool:
        if not self.placements[name].is_replicate():
            return False
        if entry or not self.sequence:
            return self.styles.get(entry) in (*COLUMNS, *ROWS, SUMMED)
        # A norm on this rank's part of the sequence.
        inside = any(name.startswith(f"{block}.") for block in self.blocks)
        return inside and region_of(name, self.regions) is None


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
