"""Which parameters are updated with which rate and weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any

from annotated_types import Ge, Gt, MinLen

from pipeline.contracts.optimizer import NamedParameter
from pipeline.errors import StageError


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """What some parameters have of their own."""

    match: Annotated[tuple[str, ...], MinLen(1)]
    """Whose: patterns of parameter names, with `*` for any text and `?` for any character
    (`*.lora_B.*`). A parameter belongs to the first group that matches it."""

    lr_ratio: Annotated[float, Gt(0)] = 1.0
    """Their learning rate as a multiple of `lr`."""

    weight_decay: Annotated[float, Ge(0)] | None = None
    """Their weight decay, whatever their dimensions; null decays them as all others."""


def make_groups(
    parameters: Iterable[NamedParameter],
    *,
    lr: float,
    weight_decay: float,
    decay_all: bool,
    own: Sequence[GroupSettings] = (),
    shards: bool = False,
) -> list[dict[str, Any]]:
    """Trainable parameters in torch groups of equal rate and decay, in order: those of `own`, then
    the rest; matrices (two or more dimensions) before what is not decayed. With `shards`, each
    tells the number of the process's shard.

    Raises StageError for a pattern that matches no trainable parameter, and for a group that has
    none because earlier ones have them all.
    """
    trained = [parameter for parameter in parameters if parameter.parameter.requires_grad]
    names = [parameter.name for parameter in trained]
    _require_matches(own, names)
    _require_members(own, names)
    found: dict[tuple[int, float], dict[str, Any]] = {}
    for parameter in trained:
        place = _place(own, parameter.name)
        settings = None if place is None else own[place]
        decay = weight_decay if decay_all or len(parameter.shape) >= 2 else 0.0
        group: dict[str, Any] = {"params": []}
        if shards:
            group["shard"] = parameter.shard
        if settings is not None:
            group["lr"] = lr * settings.lr_ratio
            decay = decay if settings.weight_decay is None else settings.weight_decay
        group["weight_decay"] = decay
        key = (len(own) if place is None else place, -decay)
        found.setdefault(key, group)["params"].append(parameter.parameter)
    return [found[key] for key in sorted(found)]


def _place(own: Sequence[GroupSettings], name: str) -> int | None:
    """Number of the first group that a parameter matches."""
    return next((place for place, group in enumerate(own) if _matches(group, name)), None)


def _matches(group: GroupSettings, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in group.match)


def _require_members(own: Sequence[GroupSettings], names: Sequence[str]) -> None:
    places = {name: _place(own, name) for name in names}
    for place, group in enumerate(own):
        if place not in places.values():
            name = next(name for name in names if _matches(group, name))
            raise StageError(
                f"groups.{place}: all parameters that it matches, such as {name}, belong to "
                f"earlier groups (groups.{places[name]})",
                hint="a parameter belongs to the first group that matches it: put the group with "
                "narrower patterns first",
            )


def _require_matches(own: Sequence[GroupSettings], names: Sequence[str]) -> None:
    for place, group in enumerate(own):
        for pattern in group.match:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise StageError(
                    f"groups.{place}.match: {pattern!r} matches no trained parameter",
                    hint="they have names like "
                    + ", ".join(names[:3])
                    + "; a tied weight has one name: a tied head is part of the embedding",
                )
