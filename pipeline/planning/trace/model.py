"""The structure of a model, and how it is divided among ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from pipeline.contracts.model import ModelSource
from pipeline.planning.shapes import Division, Weight
from pipeline.planning.trace.torch_compat import local


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A model's weights and blocks. root: weights outside of blocks, tied ones once; `tied` says
    whether two of their names share one. towers: weights of the blocks of other parts than the
    language model. signatures: everything that distinguishes a block from others but its number.
    `behind`, ends: as in `ModelShape`."""

    root: Sequence[Weight]
    blocks: Sequence[Sequence[Weight]]
    towers: Sequence[Sequence[Weight]]
    signatures: Sequence[Any]
    tied: bool
    behind: Sequence[str]
    ends: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def weights(self) -> Sequence[Weight]:
        """All weights."""
        return [*self.root, *itertools.chain(*self.towers, *self.blocks)]


def structure(source: ModelSource) -> Structure:
    """Structure of a source's model, built on the meta device, without memory."""
    with torch.device("meta"):
        model = source.build()
    source.tie(model)
    frozen_base, blocks = set(source.frozen_base), source.blocks(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    left = {
        one: Weight(
            name=name, shape=tuple(one.shape), trained=one.requires_grad,
            frozen_base=name in frozen_base, packed=not one.is_floating_point(),
        )
        for one, name in names.items()
    }  # fmt: skip
    order = {parameter: place for place, parameter in enumerate(names)}
    inside = [order[one] for block in blocks for one in block.parameters()]
    first_trained = min((n for one, n in order.items() if one.requires_grad), default=len(order))

    def taken(module: nn.Module) -> list[Weight]:
        # A weight that blocks share belongs to the first of them, the rest to the root.
        return [left.pop(one) for one in module.parameters() if one in left]

    def signature(block: nn.Module) -> Any:
        # Backward passes through a block only to trained weights before it.
        begin = min((order[one] for one in block.parameters()), default=0)
        parts = ((name, *_traits(one)) for name, one in block.named_modules())
        return (*parts, first_trained < begin)

    def weights_of(module: nn.Module | None) -> tuple[str, ...]:
        return () if module is None else tuple(names[one] for one in module.parameters())

    embedding, head = map(weights_of, source.ends(model))
    return Structure(
        blocks=[*map(taken, blocks)],
        towers=[*map(taken, source.tower_blocks(model))],
        root=[*left.values()],
        ends=(embedding, head),
        behind=[names[one] for one in order if order[one] > max(inside, default=len(order))],
        signatures=[*map(signature, blocks)],
        tied=len([*model.named_parameters(remove_duplicate=False)]) > len(names),
    )


def _traits(module: nn.Module) -> tuple[Any, ...]:
    plain = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and key != "layer_idx"
    }
    own = module.named_parameters(recurse=False)
    shapes = tuple((name, tuple(one.shape), one.requires_grad) for name, one in own)
    replaced = getattr(vars(module).get("forward"), "__qualname__", "")
    return type(module).__name__, tuple(sorted(plain.items())), shapes, replaced


def kinds(signatures: Sequence[Any]) -> list[int]:
    """Number of each block's kind. The first block is a separate kind: nothing before it may need a
    gradient."""
    known: dict[Any, int] = {}
    return [known.setdefault((n == 0, one), len(known)) for n, one in enumerate(signatures)]


@dataclass(frozen=True, kw_only=True)
class Divided:
    """Result of dividing a model: the shape of each weight's part, the number of ranks that
    have different experts of a weight, and what is exchanged by the name of each group."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, division: Division | None, model: nn.Module, blocks: Sequence[nn.Module]
    ) -> Divided:
        """Divide a model on the meta device, whose parameters become this rank's parts."""
        if division is None:
            return cls()
        groups, experts = division.divide(model, blocks)
        for module in model.modules():
            for name, one in module._parameters.items():
                if one is not None:
                    part = nn.Parameter(local(one).detach(), one.requires_grad)
                    module._parameters[name] = part
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        return cls(shapes=shapes, experts=experts, groups=groups)

    def part(self, weight: Weight) -> Weight:
        """This rank's part of a weight."""
        shape, among = self.shapes.get(weight.name, weight.shape), self.experts.get(weight.name, 1)
        if weight.packed or (shape == weight.shape and among == 1):
            return weight
        return replace(weight, shape=shape, whole=weight.shape, experts=among)
