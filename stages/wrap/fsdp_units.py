"""Which modules are gathered as one unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from pipeline.errors import StageError

if TYPE_CHECKING:
    from stages.wrap.fsdp import Fsdp


def choose_units(config: Fsdp, module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The units in forward order, inner before outer, without the root.

    Raises StageError when the recipe's choice finds none in this model, or would part tied weights.
    """
    if config.units == "block":
        units, what = list(blocks), "transformer blocks; name their classes in `units`"
    elif config.units == "size":
        # A model smaller than one unit is one unit: the root.
        return list(_by_size(module, config.unit_size))
    else:
        named = set(config.units)
        units = [m for m in _inner_first(module) if type(m).__name__ in named]
        what = f"modules of class {', '.join(sorted(named))}"
    if not units:
        raise StageError(f"{type(module).__name__} has no {what}")
    owners = _owners(module)
    for unit in units:
        if not _closed(unit, owners):
            raise StageError(
                f"{type(unit).__name__} shares a weight with a module outside of it",
                hint="choose units that hold all owners of a tied weight, or none",
            )
    return units


def _by_size(module: nn.Module, least: int) -> Iterator[nn.Module]:
    taken: set[nn.Parameter] = set()
    owners = _owners(module)

    for owner in _inner_first(module):
        own = set(owner.parameters()) - taken
        container = isinstance(owner, nn.ModuleList | nn.ModuleDict)
        if not container and sum(p.numel() for p in own) >= least and _closed(owner, owners):
            taken.update(own)
            yield owner


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    """Every module below `module`, children before their parents."""
    for child in module.children():
        yield from _inner_first(child)
        yield child


def _owners(module: nn.Module) -> dict[nn.Parameter, set[nn.Module]]:
    owners: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners[parameter].add(owner)
    return owners


def _closed(unit: nn.Module, owners: dict[nn.Parameter, set[nn.Module]]) -> bool:
    """Whether no weight of `unit` is tied to one outside; torch gathers a weight in one unit."""
    inside = set(unit.modules())
    return all(owners[parameter] <= inside for parameter in unit.parameters())
