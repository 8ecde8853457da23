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
    """A model's weights and blocks."""

    root: Sequence[Weight]
    """Weights outside of blocks, tied ones once."""
    blocks: Sequence[Sequence[Weight]]
    towers: Sequence[Sequence[Weight]]
    """Weights of the blocks of other parts than the language model."""
    signatures: Sequence[Any]
    """Everything that distinguishes a block from others but its number, for each block."""
    tied: bool
    """Whether two names of the root share one weight."""
    behind: Sequence[str]
    """Names of the root's weights that come behind the blocks."""
    ends: tuple[tuple[str, ...], tuple[str, ...]]
    """Names of the weights of the embedding and of the head, as `ModelSource.ends` gives them."""

    @property
    def weights(self) -> Sequence[Weight]:
        """All weights."""
        return [*self.root, *itertools.chain(*self.towers, *self.blocks)]


def structure(source: ModelSource) -> Structure:
    """Structure of a source's model, built on the meta device, without memory."""
    with torch.device("meta"):
        model = source.build()
    source.tie(model)
    frozen_base = set(source.frozen_base)
    names = {parameter: name for name, parameter in model.named_parameters()}
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
    inside = {one for block in blocks for one in block.parameters()}
    order = {parameter: place for place, parameter in enumerate(names)}
    last = max((order[one] for one in inside), default=len(order))
    embedding, head = source.ends(model)
    return Structure(
        ends=(_weights_of(embedding, names), _weights_of(head, names)),
        behind=[names[one] for one in order if order[one] > last],
        # A weight that blocks share belongs to the first of them, the rest to the root.
        blocks=[[left.pop(one) for one in block.parameters() if one in left] for block in blocks],
        towers=[
            [left.pop(one) for one in block.parameters() if one in left]
            for block in source.tower_blocks(model)
        ],
        root=[*left.values()],
        signatures=[
            (*((n, *_traits(one)) for n, one in block.named_modules()), _is_reached(block, order))
            for block in blocks
        ],
        tied=len([*model.named_parameters(remove_duplicate=False)]) > len(names),
    )


def _is_reached(block: nn.Module, order: Mapping[nn.Parameter, int]) -> bool:
    """Whether backward passes through a block to trained weights before it."""
    begin = min((order[one] for one in block.parameters()), default=0)
    return any(one.requires_grad for one, place in order.items() if place < begin)


def _weights_of(module: nn.Module | None, names: Mapping[nn.Parameter, str]) -> tuple[str, ...]:
    """Names of a module's weights."""
    return () if module is None else tuple(names[one] for one in module.parameters())


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
    """Number of each block's kind. The first block is a kind of its own: nothing before it may need
    a gradient."""
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
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    part = nn.Parameter(local(parameter).detach(), parameter.requires_grad)
                    module._parameters[name] = part
        named = model.named_parameters()
        shapes = {name: tuple(parameter.shape) for name, parameter in named}
        return cls(shapes=shapes, experts=experts, groups=groups)

    def part(self, weight: Weight) -> Weight:
        """This rank's part of a weight."""
        shape, experts = self.shapes.get(weight.name, weight.shape), self.experts
        if weight.packed or (shape == weight.shape and weight.name not in experts):
            return weight
        whole, among = weight.shape, experts.get(weight.name, 1)
        return replace(weight, shape=shape, whole=whole, experts=among)
