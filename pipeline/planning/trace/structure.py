"""A model's weights and blocks, and the shallower models that stand for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.artifacts import ModelSource
from pipeline.planning.shapes import Weight

Signature = Any


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A model's weights, and what its blocks are."""

    names: Sequence[str]
    """Of the modules that are blocks."""
    root: Sequence[Weight]
    """What belongs to no block, tied ones once."""
    blocks: Sequence[Sequence[Weight]]
    signatures: Sequence[Signature]
    """Of each block; those of a kind have the same."""
    tied: bool
    """Whether weights of the root are one that has two names."""

    @property
    def weights(self) -> Sequence[Weight]:
        """All of them."""
        return [*self.root, *(weight for block in self.blocks for weight in block)]


def structure(source: ModelSource) -> Structure:
    """A source's model, built on the meta device, without memory."""
    with torch.device("meta"):
        model = source.build()
    source.tie(model)
    borrowed = set(source.borrowed)
    names = {parameter: name for name, parameter in model.named_parameters()}
    blocks = source.blocks(model)
    inside = {parameter for block in blocks for parameter in block.parameters()}

    def weight(parameter: nn.Parameter) -> Weight:
        name = names[parameter]
        return Weight(
            name=name,
            shape=tuple(parameter.shape),
            trained=parameter.requires_grad,
            borrowed=name in borrowed,
            packed=not parameter.is_floating_point(),
        )

    every = [one for _, one in model.named_parameters(remove_duplicate=False)]
    modules = {module: name for name, module in model.named_modules()}
    seen: set[nn.Parameter] = set()
    own = []
    for block in blocks:
        fresh = [one for one in block.parameters() if one not in seen]
        seen.update(fresh)
        own.append([weight(one) for one in fresh])
    return Structure(
        names=[modules[block] for block in blocks],
        root=[weight(one) for one in names if one not in inside],
        blocks=own,
        signatures=[_signature(block) for block in blocks],
        tied=len(every) > len(names),
    )


def _signature(block: nn.Module) -> Signature:
    """All that tells one block from another but its number."""
    return tuple((name, *_traits(module)) for name, module in block.named_modules())


def _traits(module: nn.Module) -> tuple[Any, ...]:
    plain = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and key != "layer_idx"
    }
    own = module.named_parameters(recurse=False)
    shapes = tuple((name, tuple(one.shape)) for name, one in own)
    replaced = getattr(vars(module).get("forward"), "__qualname__", "")
    return type(module).__name__, tuple(sorted(plain.items())), shapes, replaced


def kinds(signatures: Sequence[Signature]) -> list[int]:
    """The number of each block's kind. The first block is a kind of its own: nothing before it
    may need a gradient."""
    known: dict[Any, int] = {}
    return [
        known.setdefault((place == 0, signature), len(known))
        for place, signature in enumerate(signatures)
    ]


def prefix(numbers: Sequence[int]) -> int:
    """How many of the first blocks have all kinds."""
    return 1 + max((numbers.index(kind) for kind in set(numbers)), default=-1)


def depths(signatures: Sequence[Signature], reach: int = 1) -> tuple[int, int] | None:
    """Two numbers of blocks, the larger less than all, between which a model grows as it does
    beyond: by whole periods of kinds of blocks. None where there are none.

    Something may be held for `reach` blocks ahead: each half has one of every kind that has those.
    """
    count = len(signatures)
    for period in range(1, count // 2):
        first = _irregular(signatures, period)
        least = max(2 * (reach + period), 2 * (first + period) + 1)
        shallow = least + (count - least) % period
        if shallow + period < count:
            return shallow, shallow + period
    return None


def _irregular(signatures: Sequence[Signature], period: int) -> int:
    """How many blocks at the start do not fit in with the period of those behind."""
    for place in reversed(range(len(signatures) - period)):
        if signatures[place] != signatures[place + period]:
            return place + 1
    return 0
