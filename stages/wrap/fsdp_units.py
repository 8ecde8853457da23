"""Which modules are gathered as one unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from pipeline.errors import StageError

if TYPE_CHECKING:
    from stages.wrap.fsdp import Fsdp


def choose_units(config: Fsdp, module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The units in forward order, inner before outer, without the root.

    Raises StageError when the recipe's choice finds none in this model.
    """
    if config.units == "block":
        units, what = list(blocks), "transformer blocks; name their classes in `units`"
    elif config.units == "size":
        # A model smaller than one unit is one unit: the root.
        return list(_by_size(module, config.unit_size))
    else:
        named = set(config.units)
        units = [m for m in module.modules() if type(m).__name__ in named]
        what = f"modules of class {', '.join(sorted(named))}"
    if not units:
        raise StageError(f"{type(module).__name__} has no {what}")
    return units


def _by_size(module: nn.Module, least: int) -> Iterator[nn.Module]:
    taken: set[nn.Parameter] = set()

    def visit(owner: nn.Module) -> Iterator[nn.Module]:
        for child in owner.children():
            yield from visit(child)
        own = set(owner.parameters()) - taken
        container = isinstance(owner, nn.ModuleList | nn.ModuleDict)
        if owner is not module and not container and sum(p.numel() for p in own) >= least:
            taken.update(own)
            yield owner

    yield from visit(module)
