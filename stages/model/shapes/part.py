"""Parts of a block as data: their weights are their fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from pipeline.forecast.shapes import Weight

Change = Callable[[Weight], Weight]


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Some of a model's modules. Fields may be weights, parts, tuples of them, and anything else
    that describes what is computed."""

    @property
    def own(self) -> tuple[Weight, ...]:
        """Its weights and those of its parts, in the order of the fields, without updates."""
        return tuple(_weights([getattr(self, field.name) for field in fields(self)]))

    def changed(self, change: Change) -> Self:
        """The same part with every weight replaced."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: _changed(value, change) for name, value in named.items()})


def _weights(value: Any) -> Iterator[Weight]:
    if isinstance(value, Weight):
        yield value
    elif isinstance(value, Part):
        yield from value.own
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _weights(one)


def _changed(value: Any, change: Change) -> Any:
    if isinstance(value, Weight):
        return change(value)
    if isinstance(value, Part):
        return value.changed(change)
    if isinstance(value, tuple):
        return tuple(_changed(one, change) for one in value)
    return value
