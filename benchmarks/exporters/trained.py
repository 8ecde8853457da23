"""The content of all checkpoints: weights of a model and Adam's moments, spread over ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shapes import Shape, outline

STEP = 10
SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (WEIGHT, *MOMENTS)


class Held(NamedTuple):
    """Elements [start, stop) of a flattened parameter."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model under training, with each tied parameter once."""

    shapes: Mapping[str, Shape]
    groups: tuple[tuple[str, ...], tuple[str, ...]]
    """Names of the parameters with weight decay, and of the others."""
    aliases: Mapping[str, str]

    @property
    def weight_bytes(self) -> int:
        """Return the size of the fp32 weights."""
        return 4 * sum(math.prod(shape) for shape in self.shapes.values())

    def settings(self) -> list[dict[str, Any]]:
        """Return the settings of each group."""
        return [dict(SETTINGS), {**SETTINGS, "weight_decay": 0.0}]


@functools.cache
def _trained(config: tuple[tuple[str, Any], ...]) -> Trained:
    from stages.wrap.optimizer_state import fixed_state

    model = outline(dict(config))
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    decayed = tuple(name for name, shape in shapes.items() if len(shape) > 1)
    others = tuple(name for name in shapes if name not in decayed)
    return Trained(shapes=shapes, groups=(decayed, others), aliases=fixed_state(model, ()).aliases)


def trained(config: Mapping[str, Any]) -> Trained:
    """Return the model of an architecture; lists in the config are ignored."""
    return _trained(tuple((k, v) for k, v in config.items() if not isinstance(v, list)))


def fsdp(model: Trained, rank: int, world: int) -> Iterator[Held]:
    """Return the parts of a rank under `fully_shard`: rows, as torch.chunk cuts them."""
    for name, shape in model.shapes.items():
        rows, width = shape[0], math.prod(shape[1:])
        chunk = -(-rows // world)
        start, stop = (min(chunk * edge, rows) * width for edge in (rank, rank + 1))
        if start < stop:
            yield Held(name, start, stop)


def zero3(model: Trained, rank: int, world: int) -> Iterator[Held]:
    """Return the parts of a rank under ZeRO stage 3: one of each flattened parameter, group by
    group."""
    for name in (*model.groups[0], *model.groups[1]):
        total = math.prod(model.shapes[name])
        part = -(-total // world)
        start, stop = (min(part * edge, total) for edge in (rank, rank + 1))
        if start < stop:
            yield Held(name, start, stop)


HOLDERS = {"fsdp": fsdp, "zero3": zero3}
