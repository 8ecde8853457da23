"""A model's weights and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.contracts.model import ModelSource
from pipeline.planning.shapes import Weight


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A model's weights, and what its blocks are."""

    names: Sequence[str]
    """Names of the modules that are blocks."""
    root: Sequence[Weight]
    """Weights that belong to no block, tied ones once."""
    blocks: Sequence[Sequence[Weight]]
    signatures: Sequence[Any]
    """For each block, everything but its number that distinguishes it from others."""
    tied: bool
    """Whether two names of the root share one weight."""

    @property
    def weights(self) -> Sequence[Weight]:
        """All of them."""
        return [*self.root, *(weight for block in self.blocks for weight in block)]


def structure(source: ModelSource) -> Structure:
    """A source's model, built on the meta device, without memory."""
    with torch.device("meta"):
        model = source.build()
    source.tie(model)
    frozen_base = set(source.frozen_base)
    names = {parameter: name for name, parameter in model.named_parameters()}
    modules = {module: name for name, module in model.named_modules()}
    blocks = source.blocks(model)
    left = {
        parameter: Weight(
            name=name,
            shape=tuple(parameter.shape),
            trained=parameter.requires_grad,
            frozen_base=name in frozen_base,
            packed=not parameter.is_floating_point(),
        )
        for parameter, name in names.items()
    }
    return Structure(
        # A weight that blocks share belongs to the first of them, the rest to the root.
        blocks=[[left.pop(one) for one in block.parameters() if one in left] for block in blocks],
        root=[*left.values()],
        names=[modules[block] for block in blocks],
        signatures=[tuple((n, *_traits(one)) for n, one in b.named_modules()) for b in blocks],
        tied=len([*model.named_parameters(remove_duplicate=False)]) > len(names),
    )


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


def kinds(signatures: Sequence[Any]) -> list[int]:
    """The number of each block's kind. The first block is a kind of its own: nothing before it
    may need a gradient."""
    known: dict[Any, int] = {}
    return [
        known.setdefault((place == 0, signature), len(known))
        for place, signature in enumerate(signatures)
    ]
